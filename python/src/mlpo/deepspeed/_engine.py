"""An engine with our optimizer saves and loads by _saving.py and _loading.py."""

from __future__ import annotations

import functools
from typing import Any

from . import _loading, _saving


def attach(engine: Any) -> None:
    """Gives one engine other save_checkpoint() and load_checkpoint() methods, with the same arguments and results."""
    stock_save, stock_load = engine.save_checkpoint, engine.load_checkpoint

    @functools.wraps(stock_save)
    def save_checkpoint(*arguments: Any, **options: Any) -> Any:
        return _saving.save_checkpoint(engine, stock_save, *arguments, **options)

    @functools.wraps(stock_load)
    def load_checkpoint(*arguments: Any, **options: Any) -> Any:
        return _loading.load_checkpoint(engine, stock_load, *arguments, **options)

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint
