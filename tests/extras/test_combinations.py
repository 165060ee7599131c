"""What extras refuse of the launch: combinations that cannot work, or that nobody tried."""

from __future__ import annotations

from typing import Any

import pytest
from support import run_for

from train import extras
from train.config import Config
from train.launch import Launch
from train.records import UsageError

TINY = {"model_type": "gpt2"}


def configured(**settings: Any) -> Config:
    return Config().changed(model_config=TINY, tokenizer="bytes", **settings)


def test_tiles_need_weights_that_are_whole_where_they_are_used() -> None:
    config = configured(tiled_mlp=True)
    for launch in (Launch(), Launch(world_size=2), Launch(world_size=2, engine="fsdp2")):
        extras.check(config, launch)
    for launch in (Launch(world_size=2, engine="deepspeed"), Launch(world_size=2, tp_size=2)):
        with pytest.raises(UsageError, match=r"cannot be combined with tiled_mlp: true: .*Use FSDP2 or DDP"):
            extras.check(config, launch)


@pytest.mark.parametrize(
    ("launch", "settings", "message"),
    [
        (Launch(engine="fsdp2", world_size=2), {"adapter": "qlora"}, "adapter: qlora does not work with fsdp2"),
        (Launch(engine="deepspeed", world_size=2), {"adapter": "lora"}, "adapter: lora does not work with deepspeed"),
        (Launch(world_size=2, tp_size=2), {"adapter": "lora"}, "adapter: lora does .*tensor parallel 2"),
        (Launch(engine="deepspeed", world_size=2), {"compile": True}, "deepspeed .*combined with compile: true"),
    ],
)
def test_adapters_and_compilation_are_refused_where_nobody_tried(
    launch: Launch, settings: dict[str, Any], message: str
) -> None:
    config = configured(**settings)
    for works in (Launch(), Launch(world_size=2)):
        extras.check(config, works)
    with pytest.raises(UsageError, match=message):
        extras.check(config, launch)


def test_extras_that_are_not_used_leave_no_mark_on_what_a_run_is() -> None:
    """Else a checkpoint could not be resumed without the extra, nor one of version 0.1.0, which names what is used."""
    run, core = run_for(Config()), extras.join()
    core.by_name.pop("checks", None)  # which names what the core is asked for
    assert {name: value for name, value in core.merged("identity", run, None).items() if value} == {}
