# SPDX-License-Identifier: Apache-2.0
"""The demo's picture: seconds to the first token, cold, warm and loaded."""

from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.figure import Figure

__all__ = ["draw"]

COLORS: Final = {"cold": "#b0413e", "warm": "#9aa5b1", "loaded": "#2f6f4f"}
LABELS: Final = {
    "cold": "cold\ncomputed",
    "warm": "warm\nsame process,\nits own cache",
    "loaded": "loaded\nnew process,\nfrom kvpool",
}


def draw(ttft_s: dict[str, float], prompt_tokens: int, path: Path) -> None:
    """Write the bars as PNG.

    Args:
        ttft_s: seconds by name: cold, warm, loaded.
        prompt_tokens: length of the prompt, for the title.
        path: file to write.
    """
    mpl.use("Agg")
    figure = Figure(figsize=(6.4, 4.0), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    bars = axes.bar([LABELS[n] for n in ttft_s], list(ttft_s.values()), color=[COLORS[n] for n in ttft_s], width=0.6)
    axes.bar_label(bars, labels=[f"{s * 1000:.0f} ms" for s in ttft_s.values()], padding=3)
    speedup = ttft_s["cold"] / ttft_s["loaded"]
    axes.set_title(f"First token of a {prompt_tokens}-token prompt: {speedup:.1f} times sooner", fontsize=11)
    axes.set_ylabel("seconds to first token")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.15)
    figure.savefig(path)
