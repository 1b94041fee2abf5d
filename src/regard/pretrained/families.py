"""Every architecture of transformers that regard reads and writes, by the name in its config.json.

All differences between families are data. A key of a table is the name of a module or of a parameter in regard, a value the name
in the checkpoint; {i} is the number of a layer in both.
"""

from __future__ import annotations

from regard.pretrained.decoder_families import DECODER_FAMILIES
from regard.pretrained.encoder_families import ENCODER_FAMILIES
from regard.pretrained.family import Family
from regard.pretrained.image_family import IMAGE_FAMILIES
from regard.pretrained.seq2seq_families import SEQ2SEQ_FAMILIES

#: Every architecture whose checkpoints are read, by the name that config.json has for it.
#:
#: >>> from regard.pretrained import FAMILIES
#: >>> "LlamaForCausalLM" in FAMILIES
#: True
FAMILIES: dict[str, Family] = {**ENCODER_FAMILIES, **IMAGE_FAMILIES, **DECODER_FAMILIES, **SEQ2SEQ_FAMILIES}

REFUSED: dict[str, str] = {  # architectures by the beginning of their names, and why regard has no equal model
    "Reformer": "transformers draws its buckets anew in every pass, unless hash_seed is set, and counts a pair once for every "
    "round in which it meets; reformer(...) of regard keeps its buckets and counts every pair once, which is another model",
}


def families_table() -> str:
    """Format all families as a Markdown table, for the documentation: their architectures, and what equal outputs depend on."""
    groups: dict[str, list[str]] = {}
    for name, family in FAMILIES.items():
        groups.setdefault(family.title, []).append(name)
    lines = ["| family | architectures, in and out | equal outputs |", "|---|---|---|"]
    for title, names in groups.items():
        note = next((FAMILIES[name].note for name in names if FAMILIES[name].note), "")
        architectures = ", ".join(f"`{name}`" for name in names)
        lines.append(f"| {title} | {architectures} | {note or 'Yes.'} |")
    lines += [f"| {title} | none | No: {sentence}. |" for title, sentence in REFUSED.items()]
    return "\n".join(lines)
