"""CPU time that the parent process spends on a token, sockets left out.

That is: decoding the engines' messages, journal, text, streams, and the in-process client of
`dualpace bench offline`.

    python benchmarks/frontend_cost.py [--streams 128] [--tokens 200] [--tokenizer smollm2]

Prints a line for each way to run, and JSON last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time

import msgspec

from dualpace.bench.load import LoadRequest
from dualpace.cli.bench_offline import replay_in_process
from dualpace.core.messages import EngineReady, Envelope, Submit, TokenEvent, Tokens
from dualpace.core.request import FinishReason
from dualpace.models.registry import resolve_tokenizer
from dualpace.models.tokenizer import load_tokenizer
from dualpace.server.frontend import Frontend, Limits
from dualpace.server.tokenizer import NoTokenizer, Tokenizer

VOCAB_SIZE = 32000
PROMPT_TOKENS = 1000
REPEATS = 5


async def microseconds_per_token(tokenizer: Tokenizer, streams: int, tokens: int) -> float:
    """One token for every stream in each message, as from a step of an engine."""
    ids: list[str] = []

    def send(to: str, message: object) -> None:
        if isinstance(message, Submit):
            ids.append(message.state.id)

    frontend = Frontend(tokenizer, Limits(10**6, VOCAB_SIZE, (2,)), send, engines=("gpu",))
    frontend.on_envelope(Envelope("gpu", 0, EngineReady(1, 10**6, 32)))
    rng = random.Random(0)
    load = [LoadRequest(PROMPT_TOKENS, tokens)] * streams
    prompts = [[rng.randrange(100, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)] for _ in load]
    replaying = asyncio.ensure_future(replay_in_process(frontend, load, prompts))
    while len(ids) < streams:
        await asyncio.sleep(0)
    wires = []
    for index in range(tokens):
        finish: FinishReason | None = "length" if index + 1 == tokens else None
        events = [TokenEvent(i, 0, index, rng.randrange(100, VOCAB_SIZE), finish) for i in ids]
        wires.append(msgspec.msgpack.encode(Envelope("gpu", 0, Tokens(events))))
    decode = msgspec.msgpack.Decoder(Envelope).decode
    start = time.process_time()
    for wire in wires:
        frontend.on_envelope(decode(wire))
        await asyncio.sleep(0)  # the streams' readers take what has come
    records = await replaying
    seconds = time.process_time() - start
    assert [record.output_tokens for record in records] == [tokens] * streams
    return seconds / (streams * tokens) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=200, help="per stream")
    parser.add_argument("--tokenizer", default="smollm2")
    options = parser.parse_args()
    report: dict[str, object] = {"streams": options.streams, "tokens": options.tokens}
    tokenizers: dict[str, Tokenizer] = {
        "none": NoTokenizer(),
        options.tokenizer: load_tokenizer(resolve_tokenizer(options.tokenizer)),
    }
    for name, tokenizer in tokenizers.items():
        runs = [
            asyncio.run(microseconds_per_token(tokenizer, options.streams, options.tokens))
            for _ in range(REPEATS)
        ]
        report[f"us_per_token_{name}"] = min(runs)
        print(f"tokenizer {name}: {min(runs):.1f} µs a token (worst run {max(runs):.1f})")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
