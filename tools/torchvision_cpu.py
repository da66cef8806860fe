"""Lets a torchvision that was built for CUDA be imported beside a torch without it: its operators are declared first.

tools/setup.sh puts this module into an environment where torchvision does not load, with a .pth file that imports it when
Python starts. The image operators themselves (nms) stay unusable; everything else of torchvision works.
"""

import importlib.abc
import sys

OPERATORS = ("nms", "qnms")
libraries: list[object] = []


class Declare(importlib.abc.MetaPathFinder):
    """Waits for the import of torchvision, finds nothing itself."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        library = torch.library.Library("torchvision", "DEF")
        for operator in OPERATORS:
            library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        libraries.append(library)  # its end would take the operators away


sys.meta_path.insert(0, Declare())
