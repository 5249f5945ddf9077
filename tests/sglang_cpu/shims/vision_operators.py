"""Let `import torchvision` succeed beside a CPU build of torch, in every process of an environment in which install.sh
put SGLang.

PyPI's wheel of torchvision is linked to CUDA libraries, so its compiled operators do not load here, and its Python code
then describes operators that were never declared. They are declared right before the import, and never called: SGLang
imports torchvision for image models, which these tests do not run.
"""

import sys
from importlib.abc import MetaPathFinder


class DeclareVisionOperators(MetaPathFinder):
    """An import finder that finds nothing: it only notices the first import of torchvision."""

    library = None

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Declare the operators when `name` is torchvision; the finders after this one do the import."""
        if name != "torchvision" or self.library is not None:
            return
        import torch

        self.library = torch.library.Library("torchvision", "FRAGMENT")
        if torch.version.cuda is None:
            self.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, DeclareVisionOperators())
