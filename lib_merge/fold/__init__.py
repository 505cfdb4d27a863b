"""Folding an adapter into a quantized checkpoint by way of the dense one, and the proof that it was done.

How codes are made stands in `quant/`, how bytes are copied and published in `files/`; neither is repeated here.
"""

from .check import Checked, fold_check
from .from_recipe import fold_recipe
from .quantizer import Reproduced, quantizer_check
from .run import Folded, fold

__all__ = ["Checked", "Folded", "Reproduced", "fold", "fold_check", "fold_recipe", "quantizer_check"]
