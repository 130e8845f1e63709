"""What an assist takes, measured on the stand-in: every kind of turn, and iterations of the CPU."""

from __future__ import annotations

import pytest

from dualpace.core.config import EngineOptions
from dualpace.measuring import assisting_gpu, own_arena
from dualpace.profile.assist_bench import measure, measure_iterations
from dualpace.profile.probes import Room, make_batch
from dualpace.resolution import resolve


def test_every_kind_of_turn_is_measured_and_then_the_cpu_engine_itself(tiny_model: str) -> None:
    options = EngineOptions(
        model=tiny_model, load_format="dummy", device="cpu", gpu_kv_tokens=512, cpu_cores=1,
        host_kv_size="1MiB", max_num_seqs=8, cpu_route="assist2", host_weights="none",
        profile="none",
    )  # fmt: skip
    config, spec = resolve(options)
    room = Room("gpu", 16, config.page_tokens, 8, 64, config.max_model_len)
    beside = make_batch("gpu_decode", 2, 64, room)
    host = make_batch("cpu_iteration", 4, 128, Room("host", 8, config.page_tokens, 8, 64, 64))
    assert beside is not None
    assert host is not None
    with assisting_gpu(config, own_arena(config)) as gpu:
        with gpu.mailbox() as mailbox:
            report = measure(
                mailbox, gpu.executor, gpu.executor.assist_seconds, {"decodes": beside}, "tiny",
                rows=[2, 4], attention=[0.0, 1e-3],
            )  # fmt: skip
        with gpu.cpu_executor() as cpu:
            iterations = measure_iterations(
                cpu, gpu.executor, cpu.read_seconds, {"decodes": beside}, report.quiet, host,
                config.page_bytes // config.page_tokens,
            )  # fmt: skip
    assert [work.rows for work in report.work] == [2, 4]
    kinds = [(each.rows, each.slots, each.beside, each.attention) for each in report.turns]
    assert kinds == [
        kind
        for rows in (2, 4)
        for kind in (
            (rows, 1, "nothing", 0.0),
            *((rows, slots, "decodes", s) for s in (0.0, 1e-3) for slots in (1, 2)),
        )
    ]
    for each in report.turns:
        waited = each.slots * spec.num_layers * each.attention
        assert each.iteration > waited
        assert (each.slowdown is None) == (each.beside == "nothing")
    assert [(each.route, each.beside) for each in iterations] == [
        (route, beside) for beside in ("nothing", "decodes") for route in ("assist", "assist2")
    ]
    for whole in iterations:
        assert whole.fraction == pytest.approx(whole.gb_s / whole.read_gb_s)
