"""How many KV pages fit the device beside everything else.

Measures with a trial step of the largest batch instead of predicting; knows nothing of what a page
is for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dualpace.core.config import EngineConfig, format_size
from dualpace.core.errors import HardwareError
from dualpace.core.plan import Batch, BatchRow
from dualpace.core.sampling import DecodeParams
from dualpace.gpu.torch_attention import GATHER_TOKENS

# Rules that take every branch of the sampler, for its largest workspace.
_ALL_FILTERS = DecodeParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01)


def largest_batch(config: EngineConfig) -> Batch:
    """The step with the largest workspace: a full token budget, the longest context, all sampled.

    Every row names page 0 throughout, so that one page is enough to run it.
    """
    decodes = config.max_num_seqs - 1
    # Prompts get a page at least, however many rows decode (policy.chunks).
    room = max(config.max_num_batched_tokens - decodes, config.page_tokens)
    chunk = min(room, config.max_model_len)
    sizes = [(chunk, config.max_model_len)]
    if decodes:
        context = min(config.max_model_len, max(1, GATHER_TOKENS // decodes))
        sizes += [(1, context)] * decodes
    rows = [
        BatchRow(
            request_id=f"trial-{index}",
            tokens=[0] * count,
            start=end - count,
            pages=[0] * -(-end // config.page_tokens),
            tier="gpu",
            sample=True,
            params=_ALL_FILTERS,
        )
        for index, (count, end) in enumerate(sizes)
    ]
    return Batch(number=0, rows=tuple(rows))


def measure_gpu_pages(
    config: EngineConfig, device: torch.device, trial: Callable[[], object]
) -> int:
    """Pages that fit gpu_memory_utilization of the device; weights are loaded already.

    trial: runs the largest batch. Raises `HardwareError` when not one page is left.
    """
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    trial()
    torch.cuda.synchronize(device)
    workspace = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    budget = int(total * config.gpu_memory_utilization)
    room = budget - (total - free) - workspace
    pages = int(room // config.page_bytes)
    if pages < 1:
        raise HardwareError(
            f"no GPU memory left for KV: {format_size(budget)} of {format_size(total)} may be used "
            f"(--gpu-memory-utilization {config.gpu_memory_utilization}), "
            f"{format_size(total - free)} are taken and a step needs {format_size(workspace)}"
        )
    return pages
