"""Write a Llama as checkpoints in the formats of libraries, for benchmarks/perplexity.py --also.

    python benchmarks/quantised_checkpoints.py checkpoints "gptq v1" awq "bitsandbytes nf4"

Each becomes a directory of its name below the first argument; those that are there are kept.  The
quantisers are those of the tests: they round to nearest and look at no data, so that what is lost
is the format's part alone.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

# Before torch loads its OpenMP runtime: idle threads that spin starve each other on shared cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import transformers

from support.quantised_models import FORMATS, quantise
from tidemill.service.config import load_config
from tidemill_gpuworker.demo.demo_model import demo_model_dir

NAMES = (
    "gptq v1",
    "gptq v1 symmetric",
    "gptq desc_act",
    "awq",
    "squeezellm",
    "squeezellm sparse",
    "bitsandbytes int8",
    "bitsandbytes nf4",
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="where the directories come")
    parser.add_argument(
        "formats", nargs="*", default=NAMES, metavar="FORMAT", help=f"of {', '.join(FORMATS)}"
    )
    parser.add_argument("--model", type=Path, help="directory of a Llama (the demo model)")
    options = parser.parse_args()
    for name in options.formats:
        if name not in FORMATS:
            parser.error(f"{name!r} is no format")
    return options


def write(model_dir: Path, name: str, out: Path) -> None:
    """Write one checkpoint, which has its name once it is whole."""
    made = out.with_name(f"{out.name}.part")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        quantise(model.eval(), FORMATS[name], made)
    for file in model_dir.glob("*token*"):
        shutil.copy(file, made)
    made.rename(out)


def main() -> int:
    options = parse_arguments()
    transformers.utils.logging.disable_progress_bar()
    model_dir = options.model or demo_model_dir(load_config().cache_dir)
    for name in options.formats:
        directory = options.out / name.replace(" ", "-")
        if not directory.exists():
            write(model_dir, name, directory)
        print(directory, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
