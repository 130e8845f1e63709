"""How safetensors get into memory: in the files' order, in pieces, with little memory to spare."""

from __future__ import annotations

import json
import logging
import os
import pty
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from dualpace.core.errors import ModelError
from dualpace.models import progress, staging
from dualpace.models.registry import ModelSource
from dualpace.models.safetensors_file import FileTensor, SafetensorsFile
from dualpace.models.spec import load_spec
from dualpace.models.tensors import Weight
from dualpace.models.torch_weights import Weights, load_weights
from dualpace.models.weights import iter_weights

Save = Callable[..., tuple[Path, Any]]


def weights_of(folder: Path, dtype: Any = "float32") -> Iterator[tuple[str, Weight]]:
    source = ModelSource(folder, "hf")
    return iter_weights(source, load_spec(source), dtype)


def load(folder: Path, tensors: Any, dtype: torch.dtype = torch.float32) -> Weights:
    return load_weights(tensors, load_spec(ModelSource(folder, "hf")), torch.device("cpu"), dtype)


@pytest.fixture
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SLOT_BYTES", 1000)


def test_each_file_is_read_once_from_end_to_end(save_checkpoint: Save) -> None:
    folder, _ = save_checkpoint("llama", max_shard_size="60KB")
    files: list[Path] = []
    end = 0
    for _, tensor in weights_of(folder):
        assert isinstance(tensor, FileTensor)
        if tensor.file.path not in files:
            files.append(tensor.file.path)
            end = 0
        assert tensor.file.path == files[-1]
        assert tensor.offset >= end
        end = tensor.offset + tensor.nbytes
    assert len(files) > 1
    assert files == sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("small_slots")
def test_pieces_arrive_where_whole_tensors_would(
    stored: Any, dtype: str, save_checkpoint: Save
) -> None:
    folder, _ = save_checkpoint("llama")
    file = folder / "model.safetensors"
    save_file({name: array.astype(stored) for name, array in load_file(file).items()}, file)
    weights = load(folder, weights_of(folder, dtype), getattr(torch, dtype))
    arrays = {name: np.asarray(tensor) for name, tensor in weights_of(folder, dtype)}
    assert arrays["embed_tokens"].nbytes > 10 * staging.SLOT_BYTES
    layer = weights.layers[1]
    for name, tensor in (
        ("embed_tokens", weights.embed),
        ("norm", weights.norm),
        ("lm_head", weights.lm_head),
        ("layers.1.k_proj", layer.qkv[48:64]),
        ("layers.1.up_proj", layer.gate_up[80:]),
        ("layers.1.down_proj", layer.down),
    ):
        expected = arrays[name].astype(np.float32)
        np.testing.assert_array_equal(tensor.float().numpy(), expected, err_msg=name)


def test_tensors_need_not_be_aligned_in_the_file(tmp_path: Path) -> None:
    values = np.arange(-8, 8, dtype=np.float32)
    entry = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}
    header = json.dumps({"x": entry}).encode()
    header += b" " * (3 - len(header) % 4)  # the tensor starts at an odd address
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
    tensor = SafetensorsFile(path).tensor("x", np.dtype(np.float32))
    assert tensor.offset % 4 == 3
    np.testing.assert_array_equal(tensor, values.reshape(4, 4))
    assert np.asarray(tensor).flags.aligned


@pytest.mark.usefixtures("small_slots")
def test_a_file_that_shrinks_while_it_is_read_is_named(save_checkpoint: Save) -> None:
    folder, _ = save_checkpoint("llama")
    file = folder / "model.safetensors"

    def shrinking() -> Iterator[tuple[str, Weight]]:
        for number, pair in enumerate(weights_of(folder)):
            if number == 3:
                os.truncate(file, file.stat().st_size // 2)
            yield pair

    with pytest.raises(ModelError, match=r"model\.safetensors: the file ends within tensor model"):
        load(folder, shrinking())


def test_an_index_that_names_the_wrong_file_is_refused(save_checkpoint: Save) -> None:
    folder, _ = save_checkpoint("llama", max_shard_size="60KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = index["weight_map"]["model.norm.weight"]
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"safetensors: cannot read tensor model\.norm\.weight"):
        load(folder, weights_of(folder))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 checkpoint of 320 MB in two files."""
    folder = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        vocab_size=10_000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=8, eos_token_id=2,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in LlamaForCausalLM(config).state_dict().items()}
    names = sorted(shapes)
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        arrays = {name: np.ones(shapes[name], ml_dtypes.bfloat16) for name in part}
        save_file(arrays, folder / f"model-{number}.safetensors")
    return folder


# Prints what anonymous memory grows to while an engine loads, in bytes.
MEASURE = """
import re, sys
from pathlib import Path
import torch
from dualpace.cpu.model import CpuModel
from dualpace.models.registry import ModelSource
from dualpace.models.spec import load_spec
from dualpace.models.torch_weights import load_weights
from dualpace.models.weights import iter_weights

def anonymous():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\\s*(\\d+)", status)[1]) * 1024

def watched(weights):
    global most
    for pair in weights:
        most = max(most, anonymous())
        yield pair
    most = max(most, anonymous())

source = ModelSource(Path(sys.argv[2]), "hf")
spec = load_spec(source)
torch.ones(10_000_000).mul_(2)
before = most = anonymous()
weights = watched(iter_weights(source, spec, "bfloat16"))
if sys.argv[1] == "torch":
    load_weights(weights, spec, torch.device("cpu"), torch.bfloat16)
else:
    CpuModel(spec, weights, dtype="bfloat16", cores=(0,))
print(most - before)
"""


@pytest.mark.parametrize("engine", ["torch", "native"])
def test_loading_takes_little_more_memory_than_the_weights(engine: str, large: Path) -> None:
    spec = load_spec(ModelSource(large, "hf"))
    own = 2 * spec.num_parameters
    assert own > 300e6
    extra = staging.SLOTS * staging.SLOT_BYTES if engine == "torch" else 2**25
    grown = subprocess.run(
        [sys.executable, "-c", MEASURE, engine, str(large)], check=True, capture_output=True
    )
    assert 0.9 * own < int(grown.stdout) < own + extra + 2**25


def test_one_tensor_at_a_time_is_converted(large: Path) -> None:
    largest = 10_000 * 1024
    for dtype, most in (("bfloat16", 2e6), ("float32", 4 * largest + 2e6)):
        tracemalloc.start()
        for _, tensor in weights_of(large, dtype):
            assert np.asarray(tensor).flat[0] == 1.0
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < most


def test_progress_is_logged_now_and_then(
    save_checkpoint: Save, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = save_checkpoint("llama")
    tensors = list(weights_of(folder))
    total = sum(tensor.nbytes for _, tensor in tensors)
    monkeypatch.setattr(progress, "LOG_INTERVAL", 0.0)
    with caplog.at_level(logging.INFO):
        assert list(progress.with_progress(tensors, total, "gpu engine", bar=False)) == tensors
    assert len(caplog.messages) == len(tensors)
    assert all(f" of {total / 1e9:.3g} GB" in line for line in caplog.messages[:-1])
    assert caplog.messages[-1].startswith(f"gpu engine: {total / 1e9:.3g} GB of weights loaded in")


def test_the_bar_leaves_the_cursor_alone() -> None:
    """An engine is killed when its server stops while it loads; the terminal must survive that."""
    script = (
        "import os, numpy as np; from dualpace.models.progress import with_progress;"
        "import time; weights = [('a', np.ones(500_000)), ('b', np.ones(1))];"
        "loading = with_progress(weights, 10**7, '', bar=True);"
        "next(loading); next(loading); time.sleep(0.5); os._exit(0)"
    )
    terminal, end = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    subprocess.run([sys.executable, "-c", script], stderr=end, env=environment, check=True)
    os.close(end)
    drawn = b""
    while chunk := _read(terminal):
        drawn += chunk
    os.close(terminal)
    assert b"loading weights" in drawn
    assert b"4.0/10.0 MB" in drawn
    assert b"\x1b[?25l" not in drawn  # hides the cursor


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux says so when the other end is closed
        return b""
