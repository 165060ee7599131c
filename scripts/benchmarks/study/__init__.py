"""Studies: the tables that people who fight GPU memory make by hand, each one command on any recipe.

    python scripts/study.py sweep --config recipes/quickstart.yaml --lengths 512,1024,2048 --micro_batch_sizes 1,2,4
    python scripts/study.py ablation --config recipes/quickstart.yaml --toggle loss:loss=full --output_dir runs/ablation

sweep            how sequence length and micro-batch size trade against memory and speed
cards            what fits on the cards that people own, predicted: length and micro-batch, with each technique
ablation         what each technique brings, alone and together, over several seeds
learning_rate    a range test: which rate to start from
batch_size       which global batch: loss, steps and memory for the same number of examples
context          whether the long context is used: loss by position, and recall from far back
gradient_health  what is wrong with gradients, layer by layer; whether fp16 would hold them; where to clip

``python scripts/study.py NAME --help`` shows the flags of each.
"""

import importlib
import sys

OTHERS = ("ablation", "batch_size", "cards", "context", "gradient_health", "learning_rate")
MODULES = {"sweep": "run", **{name: name for name in OTHERS}}


def main(words: list[str]) -> int:
    """Runs the study that the first word names, without a name the sweep, and returns its exit status."""
    if not words or words in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    name, rest = ("sweep", words) if words[0].startswith("-") else (words[0], words[1:])
    if name not in MODULES:
        print(f"error: {name!r} is not a study: give {', '.join(MODULES)}.", file=sys.stderr)
        return 2
    return importlib.import_module(f"scripts.benchmarks.study.{MODULES[name]}").main(rest)
