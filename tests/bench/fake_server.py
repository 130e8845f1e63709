"""A small OpenAI-compatible server for the benchmark's tests; the model's name picks its manners.

fake        every chunk tells the running usage and its engine; every third chunk has two tokens
plain       as a stock server: no engine, usage only at the end, text of every fourth token held
flaky       like fake, but every third request gets HTTP 503
full        every request gets HTTP 503
error-event the stream carries an error after three chunks
cut         the connection breaks after three chunks
endless     the stream ends in order after three chunks, but the answer does not
fatal       the whole server dies after three chunks of any stream
"""

import argparse
import asyncio
import itertools
import json
import os
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

TEXT = " a\u2028b\u0085"  # separators that JSON may carry raw and line splitters stumble over


def event(payload: dict) -> bytes:
    return f"data: {json.dumps(payload, ensure_ascii=False)}\n\n".encode()


def make_app(answer: str, engines: list[str], chat_exits: bool, is_ready: bool) -> Starlette:
    counter = itertools.count()
    readiness = itertools.count()

    async def ready(request: Request) -> Response:
        return Response(status_code=200 if is_ready and next(readiness) else 503)

    async def models(request: Request) -> Response:
        card = {"id": "fake", "object": "model", "created": 0, "owned_by": "x"}
        return JSONResponse({"object": "list", "data": [{**card, "max_model_len": 512}]})

    async def completions(request: Request) -> Response:
        body = await request.json()
        model, number = body["model"], next(counter)
        wanted = body["max_tokens"]
        if body["min_tokens"] != wanted or not body["ignore_eos"] or not body["stream"]:
            return JSONResponse({"error": {"message": "length not forced"}}, status_code=400)
        if model == "full" or (model == "flaky" and number % 3 == 2):
            return JSONResponse({"error": {"message": "no room"}}, status_code=503)
        stream = plain(body) if model == "plain" else chunks(body, model, number)
        return StreamingResponse(stream, media_type="text/event-stream")

    async def chunks(body: dict, model: str, number: int):
        done = 0
        for index in itertools.count():
            if index == 3 and model == "error-event":
                yield event({"error": {"message": "engine failed", "code": 500}})
                return
            if index == 3 and model == "cut":
                raise ConnectionError("cut on purpose")
            if index == 3 and model == "endless":
                return
            if index == 3 and model == "fatal":
                os._exit(3)
            done += min(1 + (index % 3 == 2), body["max_tokens"] - done)
            last = done == body["max_tokens"]
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": done}
            choice = {"index": 0, "text": TEXT, "finish_reason": "length" if last else None}
            engine = engines[0] if index == 0 else engines[number % len(engines)]
            yield event({"choices": [choice], "usage": usage, "engine": engine})
            await asyncio.sleep(0.002)
            if last:
                break
        yield event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    async def plain(body: dict):
        for index in range(body["max_tokens"]):
            if index % 4 != 3:
                choice = {"index": 0, "text": TEXT, "finish_reason": None}
                yield event({"choices": [choice], "usage": None})
                await asyncio.sleep(0.002)
        yield event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        yield event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    async def chat(request: Request) -> Response:
        if chat_exits:
            print("the engine is on fire", flush=True)
            os._exit(3)

        async def words():
            base = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "fake"}
            for word in answer.split(" "):
                choice = {"index": 0, "delta": {"content": word + " "}, "finish_reason": None}
                yield event({**base, "choices": [choice]})
            choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
            yield event({**base, "choices": [choice]})
            yield b"data: [DONE]\n\n"

        return StreamingResponse(words(), media_type="text/event-stream")

    return Starlette(
        routes=[
            Route("/ready", ready),
            Route("/v1/models", models),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
        ]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--answer", default="It is Paris.")
    parser.add_argument("--engines", default="gpu,cpu")
    parser.add_argument("--refuse", action="store_true", help="exit before listening")
    parser.add_argument("--chat-exits", action="store_true", help="die when asked a question")
    parser.add_argument("--never-ready", action="store_true")
    options = parser.parse_args()
    if options.refuse:
        sys.exit("no weights here")
    application = make_app(
        options.answer, options.engines.split(","), options.chat_exits, not options.never_ready
    )
    uvicorn.run(application, host="127.0.0.1", port=options.port, log_level="error")
