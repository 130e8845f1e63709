"""Profiles on disk: what is stored comes back, and only where it holds."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from dualpace.core.errors import ConfigError, DualPaceError
from dualpace.policy.cost_model import Point
from dualpace.profile.fingerprint import Fingerprint, first_difference, require_same
from dualpace.profile.table import Profile, find, load, path_of, save


def profile_of(fingerprint: Fingerprint, *points: Point) -> Profile:
    return Profile(
        model="some-model",
        date="2026-01-01T00:00:00+00:00",
        fingerprint=fingerprint,
        gpu_kv_tokens=1024,
        host_kv_tokens=4096,
        points=points,
    )


def test_a_stored_profile_comes_back_whole(fingerprint: Fingerprint, cache: Path) -> None:
    profile = profile_of(fingerprint, Point("gpu_decode", 1, 16, 0.1 + 0.2))
    path = save(profile)
    assert path == cache / "dualpace" / "profiles" / f"{fingerprint.hash}.json"
    assert load(path) == find(fingerprint) == profile


def test_a_write_that_fails_leaves_the_old_profile_and_no_litter(
    fingerprint: Fingerprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = profile_of(fingerprint, Point("gpu_decode", 1, 16, 1.0))
    path = save(old)

    def fail(*paths: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(DualPaceError, match=f"cannot store the profile in {path}: disk full"):
        save(profile_of(fingerprint))
    assert list(path.parent.iterdir()) == [path]
    assert load(path) == old


@pytest.mark.parametrize("name", Fingerprint.__struct_fields__)
def test_a_profile_of_something_else_is_refused_by_name(
    fingerprint: Fingerprint, name: str
) -> None:
    value = getattr(fingerprint, name)
    other = value + "x" if isinstance(value, str) else value + 1
    here = msgspec.structs.replace(fingerprint, **{name: other})
    assert first_difference(fingerprint, here) == name
    assert fingerprint.hash != here.hash
    with pytest.raises(ConfigError, match=f"another {name}"):
        require_same(fingerprint, here)


def test_looking_for_a_profile_tells_why_a_stored_one_does_not_hold(
    fingerprint: Fingerprint,
) -> None:
    with pytest.raises(ConfigError, match="has not been profiled"):
        find(fingerprint)
    save(profile_of(fingerprint))
    with pytest.raises(ConfigError, match=r"another torch.*'2.13.0'.*'2.14.0'"):
        find(msgspec.structs.replace(fingerprint, torch="2.14.0"))
    with pytest.raises(ConfigError, match="has not been profiled"):
        find(msgspec.structs.replace(fingerprint, num_layers=3))


@pytest.mark.parametrize("text", ["", "{}", '{"model": 1}', "\xff"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"broken\.json is not a profile"):
        load(path)
    with pytest.raises(ConfigError, match=r"cannot read the profile .*absent\.json"):
        load(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("field", "damaged"),
    [
        ("seconds", '"seconds":-1'),
        ("seconds", '"seconds":1e308'),
        ("in 0 seconds", '"seconds":0'),
        ("size", '"size":0'),
        ("context", '"context":-1'),
        ("page_tokens", '"page_tokens":0'),
        ("gpu_kv_tokens", '"gpu_kv_tokens":-5'),
        ("copy_bandwidth", '"copy_bandwidth":0'),
    ],
)
def test_numbers_that_nothing_measures_are_damage(
    fingerprint: Fingerprint, field: str, damaged: str
) -> None:
    path = save(profile_of(fingerprint, Point("gpu_decode", 1, 16, 1.0)))
    name = damaged.partition(":")[0]
    text, changes = re.subn(rf"{name}: *[-+.e\d]+", damaged, path.read_text())
    assert changes == 1
    path.write_text(text)
    with pytest.raises(ConfigError, match=field):
        load(path)


def test_new_points_replace_old_ones_and_the_others_stay(fingerprint: Fingerprint) -> None:
    old = profile_of(fingerprint, Point("gpu_decode", 1, 16, 1.0), Point("gpu_decode", 2, 16, 2.0))
    new = profile_of(fingerprint, Point("gpu_decode", 1, 16, 5.0))
    assert new.keeping(new.not_again(old)).points == (
        Point("gpu_decode", 1, 16, 5.0),
        Point("gpu_decode", 2, 16, 2.0),
    )
    assert path_of(old.fingerprint) == path_of(new.fingerprint)
