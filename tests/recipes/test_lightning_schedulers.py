"""Keys of a scheduler in `configure_optimizers`: what asks for other steps than Echelon's is refused by name."""

from typing import Any

import pytest
import torch
from support.needs import needs
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from recipes.lightning.attached import AttachedTrainer
from recipes.lightning.optimizers import Configured
from trainer.errors import ConfigError

pytestmark = needs("lightning")


def configured(kind: str, **keys: Any) -> Configured:
    from lightning_modules import AutoEncoder

    def configure(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        made = ReduceLROnPlateau(optimizer) if kind == "plateau" else ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": made, **({"monitor": "val_loss"} if kind == "plateau" else {}), **keys}]

    return Configured(type("Own", (AutoEncoder,), {"configure_optimizers": configure})(), AttachedTrainer())


@pytest.mark.parametrize(
    ("kind", "keys", "words"),
    [
        ("other", {"reduce_on_plateau": True, "monitor": "val_loss"}, "reduce_on_plateau=True with ExponentialLR, "),
        ("plateau", {"reduce_on_plateau": False}, "reduce_on_plateau=False with ReduceLROnPlateau, "),
        ("plateau", {"strict": False}, "strict=False, and ReduceLROnPlateau needs its monitor"),
        ("plateau", {"frequency": 2}, "interval='epoch' and frequency=2 with ReduceLROnPlateau, "),
        ("plateau", {"interval": "step"}, "interval='step' and frequency=1 with ReduceLROnPlateau, "),
        ("other", {"frequence": 2}, "lr_scheduler has 'frequence', which is no key of it; give scheduler, interval"),
    ],
)
def test_a_key_that_asks_for_other_steps_is_refused(kind, keys, words):
    with pytest.raises(ConfigError, match=rf"^configure_optimizers\(\): {words}"):
        configured(kind, **keys)


def test_keys_that_ask_for_what_is_done_are_taken():
    assert configured("plateau", reduce_on_plateau=True, strict=True, name="rate").schedulers[0].on_plateau
    assert not configured("other", reduce_on_plateau=False, strict=False, name="rate").schedulers[0].on_plateau
