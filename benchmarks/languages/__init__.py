"""The paper's other languages, which are compared and not shipped: CuTe, and TileLang but for prefill attention.

Importing this package makes their backends known to the operators of `wide.kernels`, as `wide bench` does in a
checkout.
"""

from pathlib import Path

from wide.kernels.dispatch import look_in

look_in(__name__, Path(__file__).parent)
