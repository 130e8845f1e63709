"""Writes the profiles that come with the package.

    python benchmarks/shipped_profiles.py [--h200-llama-3.1-8b FILE] [--h200-llama-3.1-70b FILE]

The reference machine's are what `dualpace profile run` has stored there, as far as named. The RTX
4090's is a model of a machine that nobody here has. Each says what it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from dualpace.core.errors import ConfigError
from dualpace.core.version import __version__
from dualpace.policy.cost_model import Operation, Point
from dualpace.profile.fingerprint import Fingerprint
from dualpace.profile.table import Profile, load

FOLDER = Path(__file__).parent.parent / "src/dualpace/profile/shipped"
ROWS = (1, 16, 32, 64, 128, 192, 256)
CHUNKS = (16, 64, 128, 256, 512, 1024, 2048)
CONTEXTS = (0, 1024, 8192, 32768, 131072, 524288)
PAGE_TOKENS = 32
LLAMA_8B = dict(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
    num_kv_heads=8,
)  # fmt: skip
HEAD_DIM = 128
MEASURED = {  # models by the names of measured profiles
    "h200-llama-3.1-8b": "llama-3.1-8b",
    "h200-llama-3.1-70b": "llama-3.1-70b",
}

RTX_4090 = dict(
    cpu="Intel Xeon Silver 4510", cpu_cores=12, cpu_isa="avx512_bf16",
    device="NVIDIA GeForce RTX 4090", driver="", torch="",
)  # fmt: skip
RTX_4090_NOTE = (
    "MODELLED, not measured. RTX 4090: 1008 GB/s at 85% and 165 TFLOP/s bf16 at 70% (NVIDIA Ada "
    "architecture white paper), PCIe 4 x16 at 25 GB/s. Xeon Silver 4510: 12 cores, 8 channels of "
    "DDR5-4400 = 282 GB/s (Intel ARK), of which 12 cores read 150 GB/s, attention at 80% of that, "
    "AMX at the 5 TFLOP/s that 12 cores reached on the reference machine. Assist: weights read "
    "again at half the bandwidth, four times as slow beside prompts, from which it takes as much "
    "as from decodes."
)


def grid(
    operation: Operation,
    sizes: Iterable[int],
    seconds: Callable[[int, int], float],
    contexts: Iterable[int] = CONTEXTS,
) -> list[Point]:
    contexts = tuple(contexts)
    return [Point(operation, n, c, round(seconds(n, c), 7)) for n in sizes for c in contexts]


def line(operation: Operation, seconds: dict[int, float]) -> list[Point]:
    return [Point(operation, rows, 0, round(value, 7)) for rows, value in seconds.items()]


def prefill(base: dict[int, float], flop_per_pair: float, flops: float) -> list[Point]:
    """base: seconds of a chunk at the start of a prompt; later ones attend to more."""
    return grid(
        "gpu_prefill", base, lambda n, c: base[n] + n * c * flop_per_pair / flops, CONTEXTS[:5]
    )


def profile(
    model: str, shape: dict[str, int], machine: dict[str, object], note: str, **fields: object
) -> Profile:
    token_bytes = 4 * shape["num_layers"] * shape["num_kv_heads"] * HEAD_DIM
    fingerprint = Fingerprint(
        **machine, **shape, dualpace=__version__, architecture="LlamaForCausalLM",
        head_dim=HEAD_DIM, qkv_bias=False, qk_norm=False, tie_embeddings=False, dtype="bfloat16",
        page_tokens=PAGE_TOKENS, page_bytes=PAGE_TOKENS * token_bytes,
    )  # fmt: skip
    return Profile(
        model=model, date="2026-11-30", fingerprint=fingerprint, note=note, **fields
    )  # fmt: skip


def measured(file: Path, model: str) -> Profile:
    """What `dualpace profile run` stored, as the package's."""
    stored = load(file)
    note = f"Measured by `dualpace profile run` on {stored.date[:10]}, with random weights."
    return msgspec.structs.replace(stored, model=model, note=note)


def rtx_4090_8b() -> Profile:
    token, layers, weights = 131072, 32, 16.06e9
    read, flops = 0.85 * 1008e9, 0.7 * 165e12
    row_bytes = 2 * (4096 + 6144)  # in and out again, in each layer

    def dense(tokens: int) -> float:
        return max(weights / read, tokens * 16e9 / flops)

    def assist(rows: int, slowed: float) -> float:
        return slowed * dense(rows) + layers * (20e-6 + rows * row_bytes / 25e9)

    def attention(rows: int, context: int) -> float:
        return layers * 10e-6 + context * token / 120e9

    return profile(
        "llama-3.1-8b", LLAMA_8B, RTX_4090, RTX_4090_NOTE,
        gpu_kv_tokens=35200, host_kv_tokens=491520, copy_bandwidth=25e9,
        points=(
            *grid("gpu_decode", ROWS, lambda b, c: 1e-3 + dense(b) + c * token / 800e9),
            *prefill({n: 1e-3 + dense(n) for n in CHUNKS}, 4 * 4096 * layers, 80e12),
            *grid(
                "cpu_iteration", ROWS,
                lambda m, c: max(15e9 / 150e9, m * 16e9 / 5e12) + attention(m, c),
            ),
            *grid("cpu_attention", ROWS, attention),
            *line("assist", {m: assist(m, 2.0) for m in ROWS}),
            *line("assist_beside_prefill", {m: assist(m, 4.0) for m in ROWS}),
            *line("assist_stolen", {m: dense(m) for m in ROWS}),
            *line("assist_stolen_beside_prefill", {m: dense(m) for m in ROWS}),
        ),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    for name in MEASURED:
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", dest=name)
    given = vars(parser.parse_args())
    try:
        made = {name: measured(file, MEASURED[name]) for name, file in given.items() if file}
    except ConfigError as error:
        parser.error(str(error))
    made["rtx4090-llama-3.1-8b"] = rtx_4090_8b()
    for name, profile in made.items():
        path = FOLDER / f"{name}.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
        print(path)


if __name__ == "__main__":
    main()
