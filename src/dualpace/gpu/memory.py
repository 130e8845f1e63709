"""How many KV pages fit the device beside everything else.

Measures with a trial step of the largest batch, and with the graphs, instead of predicting; knows
nothing of what a page is for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from dualpace.core.config import EngineConfig, format_size
from dualpace.core.errors import HardwareError
from dualpace.core.logprobs import MAX_LOGPROBS
from dualpace.core.plan import Batch, BatchRow
from dualpace.core.sampling import DecodeParams
from dualpace.gpu.gate import release_cache, synchronize
from dualpace.gpu.torch_attention import GATHER_TOKENS

logger = logging.getLogger(__name__)

# Rules that take every branch of the sampler, for its largest workspace.
_ALL_RULES = DecodeParams(
    temperature=1.0,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    logprobs=MAX_LOGPROBS,
)


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
            params=_ALL_RULES,
        )
        for index, (count, end) in enumerate(sizes)
    ]
    return Batch(number=0, rows=tuple(rows))


def measure_gpu_pages(
    config: EngineConfig,
    device: torch.device,
    trial: Callable[[], object],
    capture: Callable[[], object],
) -> int:
    """Pages that fit gpu_memory_utilization of the device; weights are loaded already.

    trial: runs the largest batch; capture: captures the graphs, which live as long as what it
    returns. Raises `HardwareError` when not one page is left.
    """
    trial()  # compiles kernels and sets libraries up, for good
    release_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    trial()
    synchronize()
    step = torch.cuda.max_memory_allocated(device) - before
    release_cache()
    free_without, total = torch.cuda.mem_get_info(device)
    captured = capture()
    release_cache()
    graphs = free_without - torch.cuda.mem_get_info(device)[0]
    del captured
    release_cache()
    budget = int(total * config.gpu_memory_utilization)
    taken = total - free_without
    pages = int((budget - taken - step - graphs) // config.page_bytes)
    logger.info(
        "GPU memory: %s of %s may be used (--gpu-memory-utilization %.2f): %s weights and runtime, "
        "%s for a step, %s graphs, the rest is KV",
        format_size(budget), format_size(total), config.gpu_memory_utilization,
        format_size(taken), format_size(step), format_size(max(graphs, 0)),
    )  # fmt: skip
    if pages < 1:
        raise HardwareError(
            f"no GPU memory left for KV: {format_size(budget)} of {format_size(total)} may be used "
            f"(--gpu-memory-utilization {config.gpu_memory_utilization}), {format_size(taken)} are "
            f"taken, a step needs {format_size(step)} and the graphs {format_size(graphs)}"
        )
    return pages
