"""How numbers are stored: one file a format, each an encode/decode pair."""

from foldmoe.formats.checks import refuse_nan
from foldmoe.formats.padding import pad_intermediate
from foldmoe.formats.tensor import Format, QuantizedTensor

__all__ = ["Format", "QuantizedTensor", "pad_intermediate", "refuse_nan"]
