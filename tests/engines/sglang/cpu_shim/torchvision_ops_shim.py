"""Lets torchvision be imported beside a CPU build of torch: its compiled part does not load there. For tests only.

A ``.pth`` file imports this at the start of every Python of the environment. When torchvision is imported, the two
operations are declared that it registers a shape function for; text models never call them.
"""

from __future__ import annotations

import sys
from typing import Any


class _DeclareOperations:
    """Looks at every import; at torchvision's it declares the operations, once."""

    library: Any = None

    @classmethod
    def find_spec(cls, name: str, *where: Any) -> None:  # noqa: ARG003  (Python calls it so)
        if name != "torchvision" or cls.library is not None:
            return
        import torch

        cls.library = torch.library.Library("torchvision", "FRAGMENT")
        for operation in ("nms", "qnms"):
            cls.library.define(operation + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _DeclareOperations)  # type: ignore[arg-type]
