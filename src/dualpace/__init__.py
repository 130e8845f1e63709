"""DualPace: LLM serving in which the host CPU decodes beside the GPU at its own pace.

Importing this package is light: torch and the engines are loaded when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dualpace.core.sampling import SamplingParams
from dualpace.core.version import __version__

if TYPE_CHECKING:
    from dualpace.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from dualpace.llm import LLM

        return LLM
    raise AttributeError(f"module 'dualpace' has no attribute {name!r}")
