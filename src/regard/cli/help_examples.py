"""Examples below the options in the `--help` of `regard` and of every command. Imports no torch."""

from __future__ import annotations

COMMAND_EXAMPLES: dict[str, tuple[str, ...]] = {
    "regard": ("regard list", "regard show 'Local(256) | Global(first=4)'", "regard train saw --mixer gla"),
    "list": ("regard list", "regard list --options", "regard list --json"),
    "show": (
        "regard show 'Local(16) | Global(first=2)' --causal --out pattern.png",
        "regard show runs/saw-softmax-1 'they saw the duck'",
        "regard show runs/photos photo.jpg --patch 3,5",
    ),
    "check": (
        "regard check regard.mixers.softmax:Softmax",
        "regard check 'Local(8) | Global(first=2)' --law scan_is_the_loop",
        "regard check 'performer(features=32)' --json",
    ),
    "bench": (
        "regard bench --mixers 'softmax; Local(256); linear' --lengths 512,2k,8k",
        "regard bench --mixers 'softmax; gla' --passes step --json step.json",
        "regard bench --mixers 'softmax; gla' --model --lengths 1k,16k --json a.json",
    ),
    "advise": (
        "regard advise --lengths 256,2k --mixers 'Local(128); linear'",
        "regard advise --model mypackage.models:make --lengths 512,4k --inference",
    ),
    "compare": (
        "regard compare --out comparison",
        "regard compare --tasks 'recall, induction' --mixers 'gla, Local(16)' --seeds 3",
        "regard compare --task mytask.py --mixers all --budget 2m",
    ),
    "tune": ("regard tune --dry", "regard tune --kernels tile,linear --minutes 20 --out own.json"),
    "tasks": ("regard tasks", "regard tasks multi30k --preset cpu --time", "regard tasks --json"),
    "prepare": (
        "regard prepare imdb aclImdb_v1.tar.gz",
        "regard prepare acl_titles anthology+abstracts.bib.gz --out ~/data/acl_titles",
        "regard prepare cifar10 cifar-10-binary.tar.gz",
    ),
    "train": (
        "regard train translate --pairs texts.fr texts.en --out runs/french",
        "regard train tag --conll train.conllu --valid dev.conllu --test test.conllu",
        "regard train multi30k --preset cpu --mixer gla --mixer 'Local(8)'",
    ),
    "evaluate": ("regard evaluate runs/saw-softmax-1", "regard evaluate runs/captions --split val --set beam=5 --json"),
    "predict": (
        "regard predict runs/saw-softmax-1 'they saw the duck'",
        "regard predict runs/captions sentences.txt --set beam=5 > answers.txt",
        "regard predict runs/captions sentences.txt --json > answers.jsonl",
    ),
    "distil": (
        "regard distil runs/captions --out distilled.txt --set beam=5",
        "regard train multi30k --set decoder=ctc --set distilled=distilled.txt",
    ),
}


def help_examples(command: str) -> str:
    """Return the examples of a command, or of `regard`, as the text below its options: Typer breaks lines where one is empty."""
    return "\n\n".join(("Examples:", *COMMAND_EXAMPLES[command]))
