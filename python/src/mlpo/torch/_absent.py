"""What later versions will offer, so that asking for it now says what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

from .._errors import not_offered


class Absent:
    """Methods that raise mlpo.NotOfferedError."""

    def attach_ddp(self, model: Any) -> NoReturn:
        """Not offered by this version."""
        raise not_offered(
            "OffloadAdamW.attach_ddp()",
            "with DDP use overlap=False and replicas=True: gradients are then taken at step(), after DDP's all-reduce",
        )
