"""Arrays packed behind each other come out as they were, whatever their kinds and sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dualpace.gpu.upload import COMMAND_BYTES, StagedArrays, fetch, pack, send, upload, views

ARRAYS = {
    "ids": np.arange(7, dtype=np.int64),
    "pages": np.arange(COMMAND_BYTES // 2, dtype=np.int32) - 5,
    "nothing": np.empty(0, dtype=np.float64),
    "table": np.linspace(0, 1, 30).reshape(5, 6),
    "every second": np.arange(20, dtype=np.int32)[::2],
}


@pytest.mark.parametrize("names", [[*ARRAYS], ["nothing"], ["every second", "nothing", "ids"]])
def test_what_is_packed_and_sent_comes_out_again(names: list[str]) -> None:
    arrays = {name: ARRAYS[name] for name in names}
    packed = pack(arrays)
    there = torch.empty(len(packed), dtype=torch.uint8)
    send(packed, there)
    for name, part in views(there, arrays).items():
        assert part.dtype == torch.from_numpy(ARRAYS[name].copy()).dtype
        np.testing.assert_array_equal(part.numpy(), ARRAYS[name])


def test_staged_arrays_arrive_as_filled_and_what_is_not_sent_stays() -> None:
    staged = StagedArrays(
        torch.device("cpu"), ids=(np.int64, 5), pages=(np.int32, 3), table=(np.int32, 40_000)
    )
    staged.fill("ids", np.arange(3), rest=-1)
    staged.fill("pages", np.arange(7, 10))
    staged.fill("table", np.arange(30_000))
    staged.send("table", 20_000)
    staged.fill("ids", np.full(4, 4))
    assert staged.device["ids"].tolist() == [0, 1, 2, -1, -1]
    assert staged.device["pages"].tolist() == [7, 8, 9]
    np.testing.assert_array_equal(staged.device["table"][:20_000].numpy(), np.arange(20_000))
    assert not staged.device["table"][20_000:].any()
    staged.send("pages", 0)
    assert staged.device["ids"].tolist() == [4, 4, 4, 4, -1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_gets_them_and_what_it_has_comes_back() -> None:
    for names in ([*ARRAYS], ["nothing"]):
        parts = upload({name: ARRAYS[name] for name in names}, torch.device("cuda"))
        for name, part in parts.items():
            np.testing.assert_array_equal(part.cpu().numpy(), ARRAYS[name])
    for values in (torch.arange(1000), torch.linspace(0, 1, 12).double().view(3, 4), torch.ones(0)):
        on_host = fetch(values.to("cuda", torch.float64))
        torch.cuda.synchronize()
        assert torch.equal(on_host, values.double())
