"""Activation offloading: same gradients, the order of copies, and the memory on the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from deepspeed_smddp import offload_activations
from deepspeed_smddp.models.offload import Offload, host_memory
from deepspeed_smddp.models.offload import model as offload_model

ROWS, WIDTH, LAYERS = 1024, 64, 10
WORTH = ROWS * WIDTH * 4  # of one layer's input, bytes
MODES = ("none", "non-reentrant", "reentrant")


class Block(nn.Module):
    """Saves little besides its input."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.up(self.drop(torch.tanh(self.down(x))))


class Net(nn.Module):
    def __init__(self, mode: str = "none", layers: int = LAYERS) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.mode = mode

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            if self.mode == "none":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.mode == "reentrant")
        return self.leave(x)


def made(mode: str = "none", layers: int = LAYERS) -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    return Net(mode, layers), torch.randn(ROWS, 2)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    return model(x).square().mean()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def plain(mode: str) -> list[torch.Tensor]:
    model, x = made(mode)
    loss_of(model, x).backward()
    return gradients(model)


class LateCopies:
    """Streams that run as late as allowed: a copy runs at its wait(), and keeps nothing alive.

    Copies of one direction run in the order of the requests. Before a copy uses a host buffer, it
    waits for the copy that was given as its predecessor.
    """

    def __init__(self) -> None:
        self.lost: list[str] = []  # copies whose memory was freed before they ran
        self.queues: dict[str, list[LateCopy]] = {"out": [], "back": []}
        self.latest: dict[int, LateCopy] = {}  # copy of each host buffer, by its address

    def out(self, source, host, after):
        return self._ask("out", source, host, after, host)

    def back(self, host, target, after):
        target.fill_(255)  # NaNs, until the copy runs
        return self._ask("back", host, target, after, host)

    def _ask(self, direction, source, target, after, host):
        if direction == "back" or after is not None:
            assert after is self.latest[host.data_ptr()], (
                "the predecessor is not the last copy of the buffer"
            )
        copy = self.latest[host.data_ptr()] = LateCopy(self, direction, source, target, after)
        self.queues[direction].append(copy)
        return copy


class LateCopy:
    def __init__(self, copies, direction, source, target, after) -> None:
        self.copies, self.direction, self.after = copies, direction, after
        self.ends = [
            (StorageWeakRef(t.untyped_storage()), t.storage_offset(), t.numel())
            for t in (source, target)
        ]

    def wait(self) -> None:
        queue = self.copies.queues[self.direction]
        while self in queue:
            queue.pop(0)._run()

    def _run(self) -> None:
        if self.after is not None:
            self.after.wait()
        found = []
        for weak, offset, size in self.ends:
            storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is None:
                self.copies.lost.append(self.direction)
                return
            found.append(torch.empty(0, dtype=torch.uint8).set_(storage, offset, (size,)))
        found[1].copy_(found[0])


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateCopies:
    copies = LateCopies()
    monkeypatch.setattr(offload_model, "Copies", lambda device: copies)
    return copies


@pytest.mark.parametrize("horizon", [1, 2, 4, 20])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_to_the_bit(mode: str, horizon: int) -> None:
    expected = plain(mode)
    model, x = made(mode)
    offload = offload_activations(model, horizon)
    for _ in range(3):
        loss_of(model, x).backward()
        assert same(gradients(model), expected)
    counts = offload.statistics
    assert counts.passes == 3
    assert counts.resident_bytes == 0
    assert counts.late == 0
    assert counts.bytes_out == counts.bytes_back
    leaving = max(0, LAYERS - (horizon + 1))
    assert counts.bytes_out >= 3 * leaving * WORTH
    assert offload.host_bytes <= counts.bytes_out / 3


@pytest.mark.parametrize("mode", MODES)
def test_order_holds_when_every_copy_runs_as_late_as_allowed(mode: str, late: LateCopies) -> None:
    expected = plain(mode)
    model, x = made(mode)
    offload = offload_activations(model, 2)
    for _ in range(3):
        loss_of(model, x).backward()
        assert same(gradients(model), expected)
    assert late.lost == []
    assert offload.statistics.bytes_back > 0
    assert offload.statistics.late == 0


def peak_of_cpu_allocator(model: nn.Module, x: torch.Tensor) -> int:
    """The peak of live bytes of torch's own allocator, above those at the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss_of(model, x).backward()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    live = peak = 0
    for event in events:
        live += event.nbytes()
        peak = max(peak, live)
    model.zero_grad()
    return peak


@pytest.mark.parametrize("horizon", [1, 2, 4])
@pytest.mark.parametrize("mode", ["non-reentrant", "reentrant"])
def test_horizon_plus_one_layers_are_resident(mode: str, horizon: int, tmp_path: Path) -> None:
    model, x = made(mode)
    without = peak_of_cpu_allocator(model, x)
    # Mapped files bypass torch's allocator, as host memory bypasses a device's.
    offload = offload_activations(model, horizon, directory=str(tmp_path))
    loss_of(model, x).backward()
    offload.reset_statistics()
    model.zero_grad()
    with_it = peak_of_cpu_allocator(model, x)
    window = (horizon + 1) * WORTH
    besides = without - LAYERS * WORTH  # the peak without the layers' inputs
    assert besides > 0
    assert abs(with_it - besides - window) <= 0.1 * window
    assert abs(offload.statistics.peak_resident_bytes - window) <= 0.1 * window


def test_files_have_no_name_and_end_with_the_model(tmp_path: Path) -> None:
    model, x = made("non-reentrant")
    offload = offload_activations(model, 2, directory=str(tmp_path))
    loss = loss_of(model, x)
    maps = Path("/proc/self/maps").read_text()
    assert maps.count(str(tmp_path)) == LAYERS - 3
    assert list(tmp_path.iterdir()) == []
    loss.backward()
    assert same(gradients(model), plain("non-reentrant"))
    second = loss_of(model, x)
    offload.remove()
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    second.backward()
    assert same(gradients(model), plain("non-reentrant"))
    assert offload.host_bytes == 0
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_with_a_later_backward_pass(mode: str, late: LateCopies) -> None:
    def train(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        losses = [loss_of(model, part) for part in x.chunk(3)]
        for loss in losses[1:] + losses[:1]:
            loss.backward()
        return gradients(model)

    expected = train(*made(mode))
    model, x = made(mode)
    offload = offload_activations(model, 2)
    assert same(train(model, x), expected)
    assert same(train(model, x), expected)
    assert offload.statistics.resident_bytes == 0
    assert late.lost == []


@pytest.mark.parametrize("mode", ["none", "non-reentrant"])
def test_second_backward_through_a_retained_graph(mode: str) -> None:
    model, x = made(mode)
    loss = loss_of(model, x)
    loss.backward(retain_graph=True)
    loss.backward()
    expected = gradients(model)
    offload = offload_activations(model, 2)
    loss = loss_of(model, x)
    loss.backward(retain_graph=True)
    loss.backward()
    assert same(gradients(model), expected)
    assert offload.statistics.resident_bytes == 0


def test_a_discarded_graph_leaves_nothing(late: LateCopies) -> None:
    model, x = made()
    offload = offload_activations(model, 2)
    loss = loss_of(model, x)
    held = offload.host_bytes
    del loss
    assert offload.statistics.resident_bytes == 0
    loss_of(model, x).backward()
    assert offload.host_bytes == held, "buffers are used again"
    assert same(gradients(model), plain("none"))
    assert late.lost == []


def test_forward_passes_that_fail_or_need_no_gradient() -> None:
    model, x = made()
    offload = offload_activations(model, 2)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model.layers[3](x)
    handle = model.layers[3].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    handle.remove()
    assert offload.statistics.resident_bytes == 0
    with torch.no_grad():
        model(x)
    assert offload.statistics.passes == 1
    loss_of(model, x).backward()
    assert same(gradients(model), plain("none"))


def test_layers_that_are_called_twice_or_never() -> None:
    class Looped(Net):
        def forward(self, x):
            x = self.enter(x)
            for turn in range(self.turns):
                for layer in self.layers[turn:]:
                    x = checkpoint(layer, x, use_reentrant=False)
            return self.leave(x)

    torch.manual_seed(0)
    model, x = Looped(layers=4), torch.randn(ROWS, 2)
    expected = []
    for turns in (3, 1, 2):
        model.turns = turns
        loss_of(model, x).backward()
        expected.append(gradients(model))
    offload = offload_activations(model, 1)
    for turns, gradient in zip((3, 1, 2), expected, strict=True):
        model.turns = turns
        loss_of(model, x).backward()
        assert same(gradients(model), gradient)
    assert offload.statistics.resident_bytes == 0


class Awkward(nn.Module):
    """Views of one storage, strides of every kind, a frozen tensor, integers, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("angles", torch.randn(ROWS, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        mixed = (q.t() @ k).softmax(-1) * self.angles[:WIDTH]
        picked = v.take_along_dim(v.argsort(-1), -1)
        spread = picked[:, :1].expand(-1, WIDTH) * v
        return x + torch.nn.functional.linear(spread @ mixed, self.out.weight) * self.angles.cos()


def test_views_and_strides(late: LateCopies) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, WIDTH), nn.Sequential(*(Awkward() for _ in range(6))))
    x = torch.randn(ROWS, 2)
    loss_of(model, x).backward()
    expected = gradients(model)
    offload = offload_activations(model, 1)
    assert offload.layers == list(model[1])
    loss_of(model, x).backward()
    assert same(gradients(model), expected)
    assert late.lost == []


def test_views_of_one_storage_are_copied_out_once() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return x + q * k * v

    model = nn.Sequential(nn.Linear(2, WIDTH), nn.Sequential(*(Parts() for _ in range(6))))
    offload = offload_activations(model, 1)
    loss_of(model, torch.randn(ROWS, 2)).backward()
    # x, the three parts of qkv, q * k; of the four layers that leave.
    assert offload.statistics.bytes_out == 4 * 5 * WORTH


def test_a_tensor_changed_in_place_is_still_an_error() -> None:
    class Changes(nn.Module):
        def forward(self, x):
            y = torch.exp(x)
            return y.add_(1)

    model = nn.Sequential(nn.Linear(2, WIDTH), nn.ModuleList(), nn.Sequential(Changes(), Changes()))
    model[1] = nn.Identity()
    offload_activations(model, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of(model, torch.randn(ROWS, 2)).backward()


def test_remove_and_misuse(tmp_path: Path) -> None:
    model, x = made()
    offload = offload_activations(model)
    with pytest.raises(ValueError, match="offloaded already"):
        offload_activations(model)
    offload.remove()
    loss_of(model, x).backward()
    assert same(gradients(model), plain("none"))
    assert offload.statistics.passes == 0
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="horizon is"):
            offload_activations(model, wrong)
    with pytest.raises(ValueError, match="no layers were found in Linear"):
        offload_activations(nn.Linear(2, 2))
    with pytest.raises(NotADirectoryError, match="nowhere"):
        offload_activations(model, directory=str(tmp_path / "nowhere"))
    again = offload_activations(model, layers=model.layers[2:7])
    assert isinstance(again, Offload)
    loss_of(model, x).backward()
    assert same(gradients(model), plain("none"))
    assert again.statistics.bytes_out > 0


def test_results_of_collectives_in_flight_are_offloaded() -> None:
    class UnderWay(torch.Tensor):
        """Like torch's AsyncCollectiveTensor: a wrapper whose tensor is ready after a wait."""

        __torch_function__ = torch._C._disabled_torch_function_impl

        def trigger_wait(self):
            return self.as_subclass(torch.Tensor)

    class Gathers(nn.Module):
        def forward(self, x):
            return torch.sin(x.as_subclass(UnderWay)).as_subclass(torch.Tensor)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, WIDTH), nn.Sequential(*(Gathers() for _ in range(4))))
    x = torch.randn(ROWS, 2)
    loss_of(model, x).backward()
    expected = gradients(model)
    offload = offload_activations(model, 1)
    loss_of(model, x).backward()
    assert same(gradients(model), expected)
    assert offload.statistics.bytes_out == 2 * WORTH


def test_a_buffer_that_a_finaliser_gives_back_meanwhile_is_not_lent_by_mistake(monkeypatch) -> None:
    memory = host_memory.HostMemory(pinned=False)
    small, large = memory.take(100), memory.take(200)
    memory.give_back(large)
    search = host_memory.bisect_left

    def interrupted(*args, **kwargs) -> int:
        place = search(*args, **kwargs)
        memory.give_back(small)
        return place

    monkeypatch.setattr(host_memory, "bisect_left", interrupted)
    assert memory.take(150) is large
    monkeypatch.undo()
    assert (memory.take(50), memory.nbytes) == (small, 300)
