"""A small English grammar in which only context separates nouns, verbs and auxiliaries: "can the can can the fish ?"

    sentence = clause (and clause)? .   |   AUX subject VERB rest ?   |   VERB rest .
    clause   = subject (AUX ADV? VERB | ADV? VERB) rest
    rest     = object? (PART VERB object?)? (ADP object)?
    subject, object = PRON | DET ADJ* NOUN

A noun always has a determiner, so every sentence has exactly one reading (a test tries all others).
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

Word = tuple[str, str]  # and its tag

# base and third person of a verb; in the first group the same two forms are singular and plural of a noun
BOTH = [
    (word, word + "s")
    for word in ["can", "will", "saw", "duck", "play", "walk", "book", "park", "ring", "cook", "guard", "stamp", "light"]
]
BOTH += [("fish", "fishes"), ("watch", "watches"), ("fly", "flies")]
VERBS = [("like", "likes"), ("see", "sees"), ("hear", "hears"), ("clean", "cleans"), ("dry", "dries"), ("warm", "warms")]
NOUNS = [("bird", "birds"), ("river", "rivers"), ("teacher", "teachers"), ("must", "musts"), ("might", "mights")]
PAST = ["saw", "felt", "ground", "rose", "heard", "found"]
PAST_NOUNS = [("felt", "felts"), ("ground", "grounds"), ("rose", "roses")]
AUXILIARY = ["can", "will", "might", "must"]
ADJECTIVES = ["clean", "dry", "warm", "big", "red"]
ADVERBS = ["often", "never"]
PREPOSITIONS = ["near", "with", "to"]
SUBJECTS, OBJECTS = ["i", "you", "we", "they"], ["me", "you", "us", "them"]
SINGULAR_DETERMINERS, PLURAL_DETERMINERS = ["a", "the", "this", "every", "my"], ["the", "these", "some", "my"]


class Phrase(NamedTuple):
    words: list[Word]
    third: bool  # third person singular: the verb ends in s


def sentence(rng: Random) -> list[Word]:
    """Draw a sentence: its words with their tags."""
    kind = rng.random()
    if kind < 0.2:
        auxiliary = (rng.choice(AUXILIARY), "AUX")
        return [auxiliary, *_noun_phrase(rng, SUBJECTS).words, _verb(rng), *_verb_phrase(rng), ("?", "PUNCT")]
    if kind < 0.35:
        return [_verb(rng), *_verb_phrase(rng), (".", "PUNCT")]
    more = [("and", "CCONJ"), *_clause(rng)] if kind > 0.85 else []
    return [*_clause(rng), *more, (".", "PUNCT")]


def _clause(rng: Random) -> list[Word]:
    subject = _noun_phrase(rng, SUBJECTS)
    adverb = _maybe(rng, 0.15, [(rng.choice(ADVERBS), "ADV")])
    kind = rng.random()
    if kind < 0.4:
        verb = [(rng.choice(AUXILIARY), "AUX"), *adverb, _verb(rng)]
    elif kind < 0.6:
        verb = [*adverb, (rng.choice(PAST), "VERB")]
    else:
        verb = [*adverb, _verb(rng, third=subject.third)]
    return [*subject.words, *verb, *_verb_phrase(rng)]


def _verb_phrase(rng: Random) -> list[Word]:
    found = _maybe(rng, 0.7, _noun_phrase(rng, OBJECTS).words)
    found += _maybe(rng, 0.2, [("to", "PART"), _verb(rng), *_maybe(rng, 0.5, _noun_phrase(rng, OBJECTS).words)])
    return found + _maybe(rng, 0.3, [(rng.choice(PREPOSITIONS), "ADP"), *_noun_phrase(rng, OBJECTS).words])


def _noun_phrase(rng: Random, pronouns: list[str]) -> Phrase:
    if rng.random() < 0.3:
        return Phrase([(rng.choice(pronouns), "PRON")], False)
    singular = rng.random() < 0.6
    forms = rng.choice(BOTH) if rng.random() < 0.8 else rng.choice([*NOUNS, *PAST_NOUNS])
    adjective = _maybe(rng, 0.25, [(rng.choice(ADJECTIVES), "ADJ")])
    determiner = rng.choice(SINGULAR_DETERMINERS if singular else PLURAL_DETERMINERS)
    return Phrase([(determiner, "DET"), *adjective, (forms[not singular], "NOUN")], singular)


def _verb(rng: Random, third: bool = False) -> Word:
    forms = rng.choice(BOTH) if rng.random() < 0.7 else rng.choice(VERBS)
    return forms[third], "VERB"


def _maybe(rng: Random, chance: float, words: list[Word]) -> list[Word]:
    return words if rng.random() < chance else []
