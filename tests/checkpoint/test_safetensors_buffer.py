"""The memory of a checkpoint's file."""

import torch

from trainer.checkpoint.safetensors_buffer import pin


def test_pages_are_locked_exactly_and_until_the_last_view_goes(monkeypatch):
    """torch's own pinned memory is rounded up to a power of two, and never given back."""
    calls = []

    class Cudart:
        def cudaHostRegister(self, start: int, size: int, flags: int) -> int:
            calls.append(("register", start, size))
            return 0

        def cudaHostUnregister(self, start: int) -> int:
            calls.append(("unregister", start))
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(torch.cuda, "check_error", calls.append)
    memory = torch.empty(1000, dtype=torch.uint8)
    start, registered = memory.data_ptr(), [("register", memory.data_ptr(), 1000), 0]
    pin(memory)
    view = memory[10:20].numpy().data
    del memory
    assert calls == registered
    del view
    assert calls == [*registered, ("unregister", start)]
