"""From options and profiles to targets, refusals, and a server that does without its host."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from dualpace.cli import quick_profile
from dualpace.core.config import EngineConfig, EngineOptions
from dualpace.core.errors import ConfigError
from dualpace.core.plan import Route
from dualpace.policy.cost_model import Point
from dualpace.policy.gated import GatedPolicy
from dualpace.policy.host import ADMITTED
from dualpace.policy.registry import make_policy
from dualpace.profile.fingerprint import Fingerprint
from dualpace.profile.settle import host_rules, lacks_profile, settle
from dualpace.profile.table import Profile, load, save

OPTIONS = EngineOptions(model="m")
GIB = 2**30


def config(**fields: object) -> EngineConfig:
    defaults = {
        "model": "m", "load_format": "auto", "dtype": "bfloat16", "device": "cuda",
        "policy": "dualpace", "max_model_len": 4096, "max_num_seqs": 256,
        "max_num_batched_tokens": 1024, "steps_in_flight": 2, "page_tokens": 32,
        "page_bytes": 32 * 131072, "gpu_pages": 1100, "gpu_memory_utilization": 0.9,
        "gpu_threads": 1, "host_pages": 6000, "cpu_ids": (0, 1), "cpu_isa": "auto",
        "cpu_routes": ("local",), "host_weights": True, "seed": 0,
    }  # fmt: skip
    return EngineConfig(**{**defaults, **fields})  # type: ignore[arg-type]


def profile(fingerprint: Fingerprint, weights: float = 0.1, row: float = 1e-6) -> Profile:
    """A CPU iteration takes `weights` seconds and `row` for each token of context."""
    points = [
        Point(operation, size, context, fixed + slope * context)
        for operation, fixed, slope in (
            ("cpu_iteration", weights, row), ("gpu_decode", 0.02, 1e-7),
            ("gpu_prefill", 0.02, 1e-7),
        )
        for size in (1, 256)
        for context in (0, 100_000)
    ]  # fmt: skip
    return Profile(
        model="m", date="2026-01-01", fingerprint=fingerprint, gpu_kv_tokens=35_200,
        host_kv_tokens=192_000, points=tuple(points),
    )  # fmt: skip


def test_the_target_comes_from_the_profile_unless_it_is_asked(
    fingerprint: Fingerprint, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(profile(fingerprint))
    with caplog.at_level(logging.INFO):
        settled = settle(OPTIONS, config(), fingerprint, 16 * GIB)
    assert settled.profile_file == str(path)
    assert settled.cpu_itl_target == pytest.approx((0.1 + 224 * 1.024e-3) / ADMITTED)
    assert "CPU ITL target 0.37 s (from the profile)" in caplog.text
    asked = msgspec.structs.replace(OPTIONS, cpu_itl_target=0.5, gpu_itl_target=0.05)
    settled = settle(asked, config(), fingerprint, 16 * GIB)
    assert (settled.cpu_itl_target, settled.gpu_itl_target) == (0.5, 0.05)
    rules = host_rules(settled, 16 * GIB)
    assert rules is not None
    assert rules.cpu_itl_target == 0.5
    assert rules.costs.cpu_iteration(10, 10_000).seconds == pytest.approx(0.11)


def test_without_a_profile_a_guess_bounds_the_host_and_on_the_stand_in_nothing_does(
    fingerprint: Fingerprint,
) -> None:
    settled = settle(OPTIONS, config(), fingerprint, 16 * GIB)
    assert (settled.profile_file, settled.cpu_itl_target) == (None, 1.0)
    standin = settle(OPTIONS, config(device="cpu", gpu_pages=0), fingerprint, 16 * GIB)
    assert standin.cpu_itl_target is None
    assert host_rules(standin, 16 * GIB) is None


@pytest.mark.parametrize(
    ("made", "pages", "reason"),
    [(dict(weights=3.0), 6000, "a token there"), (dict(), 20, "holds no request"),
     (dict(weights=0.9, row=1e-4), 6000, "--cpu-itl-target")],
)  # fmt: skip
def test_a_host_that_cannot_help_is_left_alone_and_the_log_says_why(
    made: dict[str, float],
    pages: int,
    reason: str,
    fingerprint: Fingerprint,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save(profile(fingerprint, **made))
    settled = settle(OPTIONS, config(host_pages=pages), fingerprint, 16 * GIB)
    assert (settled.policy, settled.host_pages) == ("gpu-only", 0)
    assert reason in caplog.text
    no_seats = settle(OPTIONS, config(host_pages=pages, gpu_pages=0), fingerprint, 16 * GIB)
    assert no_seats.policy == "dualpace"  # there is nothing but the host


def test_a_profile_of_something_else_is_refused_by_name_where_it_was_asked_for(
    fingerprint: Fingerprint, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(profile(fingerprint))
    here = msgspec.structs.replace(fingerprint, cpu_cores=3)
    asked = msgspec.structs.replace(OPTIONS, profile=str(path))
    with pytest.raises(ConfigError, match="another cpu_cores"):
        settle(asked, config(), here, 16 * GIB)
    with caplog.at_level(logging.INFO):
        assert settle(OPTIONS, config(), here, 16 * GIB).profile_file is None
    assert "another cpu_cores" in caplog.text


ALL_ROUTES: tuple[Route, ...] = ("local", "assist", "assist2")


@pytest.mark.parametrize(
    ("measured", "allowed", "routes"),
    [
        (False, ALL_ROUTES, ("local",)),
        (False, ("assist2",), ("assist2",)),
        (True, ALL_ROUTES, ALL_ROUTES),
        (True, ("assist", "assist2"), ("assist", "assist2")),
    ],
)
def test_nobody_is_assisted_on_a_guess_who_has_not_asked_for_it(
    fingerprint: Fingerprint,
    measured: bool,
    allowed: tuple[Route, ...],
    routes: tuple[Route, ...],
) -> None:
    if measured:
        assists = [
            Point(operation, size, context, 0.05)
            for operation in ("assist", "assist_stolen", "cpu_attention")
            for size in (1, 256)
            for context in (0, 100_000)
        ]  # fmt: skip
        made = profile(fingerprint)
        save(msgspec.structs.replace(made, points=(*made.points, *assists)))
    settled = settle(OPTIONS, config(cpu_routes=allowed), fingerprint, 16 * GIB)
    assert settled.cpu_routes == routes
    rules = host_rules(settled, 16 * GIB)
    assert rules is not None
    assert rules.routes == routes


def test_gated_steps_need_a_profile_that_knows_cpu_attention(fingerprint: Fingerprint) -> None:
    options = msgspec.structs.replace(OPTIONS, policy="gated")
    gated = config(policy="gated", cpu_routes=("assist", "assist2"), host_weights=False)
    with pytest.raises(ConfigError, match=r"needs a profile .*has not been profiled"):
        settle(options, gated, fingerprint, 16 * GIB)
    assert lacks_profile(options, gated, fingerprint)
    made = profile(fingerprint)
    save(made)
    with pytest.raises(ConfigError, match="dualpace profile run m --policy gated"):
        settle(options, gated, fingerprint, 16 * GIB)
    attention = tuple(
        Point("cpu_attention", size, context, 0.01) for size in (1, 256) for context in (0, 1000)
    )
    path = save(msgspec.structs.replace(made, points=(*made.points, *attention)))
    settled = settle(options, gated, fingerprint, 16 * GIB)
    assert settled == msgspec.structs.replace(gated, profile_file=str(path))
    assert not lacks_profile(options, gated, fingerprint)
    policy = make_policy("gated", 256, host_rules(settled, 16 * GIB), layers=32)
    assert isinstance(policy, GatedPolicy)
    with pytest.raises(ConfigError, match="--profile is none"):
        settle(msgspec.structs.replace(options, profile="none"), gated, fingerprint, 16 * GIB)
    other = msgspec.structs.replace(fingerprint, cpu_cores=3)
    named = msgspec.structs.replace(options, profile=str(path))
    with pytest.raises(ConfigError, match=r"--policy gated .* another cpu_cores"):
        settle(named, gated, other, 16 * GIB)


def test_only_a_gpu_that_nobody_has_measured_is_profiled_first(fingerprint: Fingerprint) -> None:
    assert lacks_profile(OPTIONS, config(), fingerprint)
    for settled in (config(device="cpu"), config(host_pages=0), config(policy="gpu-only")):
        assert not lacks_profile(OPTIONS, settled, fingerprint)
    without = msgspec.structs.replace(OPTIONS, profile="none")
    assert not lacks_profile(without, config(), fingerprint)
    save(profile(fingerprint))
    assert not lacks_profile(OPTIONS, config(), fingerprint)
    other = msgspec.structs.replace(fingerprint, torch="3.0")
    assert lacks_profile(OPTIONS, config(), other)


def test_a_quick_profile_is_of_the_very_options_that_it_is_given(
    tiny_model: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EngineOptions(
        model=tiny_model, load_format="dummy", host_kv_size="1MiB", gpu_kv_tokens=512, cpu_cores=1,
        page_tokens=16, cpu_isa="portable",
    )  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["quick_profile", msgspec.json.encode(options).decode()])
    monkeypatch.setattr(quick_profile, "SECONDS", 0.3)
    quick_profile.main()
    [path] = cache.rglob("*.json")
    measured = load(path).fingerprint
    assert (measured.page_tokens, measured.cpu_isa) == (16, "portable")


def test_a_quick_profile_does_not_outlive_the_server_that_asked_for_it(cache: Path) -> None:
    options = EngineOptions(model="smollm2", load_format="dummy", device="cpu")
    command = [sys.executable, "-m", "dualpace.cli.quick_profile"]
    with subprocess.Popen(
        [*command, msgspec.json.encode(options).decode()], stdin=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(5)
        process.stdin.close()  # as if the server had been killed
        assert process.wait(15) == 1
    assert not list(cache.rglob("*.json"))
