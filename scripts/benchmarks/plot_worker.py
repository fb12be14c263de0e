"""Draws charts with matplotlib, in an environment that has it. Equal input gives equal files.

What to draw comes as JSON on standard input: a list of {"path", "title", "source", "x_label",
"y_label", "panels": [{"title", "x", "lines": [{"label", "y", "low", "high"}]}]}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot

COLOURS = ("#0b6e99", "#d9730d", "#448361", "#9065b0")
"""Told apart with any kind of colour vision; the first is ours."""


def draw(chart: dict[str, Any]) -> None:
    """One file: panels side by side, x on a scale of powers of two."""
    panels = chart["panels"]
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.2 * len(panels), 3.4), squeeze=False, layout="constrained"
    )
    for axis, panel in zip(axes[0], panels, strict=True):
        for colour, line in zip(COLOURS, panel["lines"], strict=False):
            spread = [
                [y - low for y, low in zip(line["y"], line["low"], strict=True)],
                [high - y for y, high in zip(line["y"], line["high"], strict=True)],
            ]
            axis.errorbar(
                panel["x"], line["y"], yerr=spread, label=line["label"], color=colour,
                marker="o", markersize=4, linewidth=1.5, capsize=2,
            )  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_xticks(panel["x"], [str(x) for x in panel["x"]])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.set_title(panel["title"], fontsize=10)
        axis.set_xlabel(chart["x_label"])
        axis.grid(visible=True, linewidth=0.4)
    axes[0][0].set_ylabel(chart["y_label"])
    axes[0][0].legend(fontsize=8)
    figure.suptitle(chart["title"], fontsize=11)
    figure.savefig(chart["path"], metadata={"Date": None, "Description": chart["source"]})
    pyplot.close(figure)


if __name__ == "__main__":
    mpl.rcParams["svg.hashsalt"] = "shark-llm"
    mpl.rcParams["font.family"] = "DejaVu Sans"
    for wanted in json.load(sys.stdin):
        draw(wanted)
