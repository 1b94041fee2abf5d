"""A small English in which a word is a noun, a verb or an auxiliary by where it stands alone: "can the can can the fish ?"

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

# base and third person of a verb; for the first group the same two forms are one and many of a noun
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
NEAR = ["near", "with", "to"]
SUBJECTS, OBJECTS = ["i", "you", "we", "they"], ["me", "you", "us", "them"]
ONE, MANY = ["a", "the", "this", "every", "my"], ["the", "these", "some", "my"]


class Phrase(NamedTuple):
    words: list[Word]
    one: bool  # he, she or it: the verb has an s


def sentence(dice: Random) -> list[Word]:
    kind = dice.random()
    if kind < 0.2:
        return [(dice.choice(AUXILIARY), "AUX"), *_who(dice, SUBJECTS).words, _verb(dice), *_verb_phrase(dice), ("?", "PUNCT")]
    if kind < 0.35:
        return [_verb(dice), *_verb_phrase(dice), (".", "PUNCT")]
    more = [("and", "CCONJ"), *_clause(dice)] if kind > 0.85 else []
    return [*_clause(dice), *more, (".", "PUNCT")]


def _clause(dice: Random) -> list[Word]:
    who = _who(dice, SUBJECTS)
    now = _maybe(dice, 0.15, [(dice.choice(ADVERBS), "ADV")])
    kind = dice.random()
    if kind < 0.4:
        done = [(dice.choice(AUXILIARY), "AUX"), *now, _verb(dice)]
    elif kind < 0.6:
        done = [*now, (dice.choice(PAST), "VERB")]
    else:
        done = [*now, _verb(dice, third=who.one)]
    return [*who.words, *done, *_verb_phrase(dice)]


def _verb_phrase(dice: Random) -> list[Word]:
    found = _maybe(dice, 0.7, _who(dice, OBJECTS).words)
    found += _maybe(dice, 0.2, [("to", "PART"), _verb(dice), *_maybe(dice, 0.5, _who(dice, OBJECTS).words)])
    return found + _maybe(dice, 0.3, [(dice.choice(NEAR), "ADP"), *_who(dice, OBJECTS).words])


def _who(dice: Random, pronouns: list[str]) -> Phrase:
    if dice.random() < 0.3:
        return Phrase([(dice.choice(pronouns), "PRON")], False)
    one = dice.random() < 0.6
    forms = dice.choice(BOTH) if dice.random() < 0.8 else dice.choice([*NOUNS, *PAST_NOUNS])
    described = _maybe(dice, 0.25, [(dice.choice(ADJECTIVES), "ADJ")])
    return Phrase([(dice.choice(ONE if one else MANY), "DET"), *described, (forms[not one], "NOUN")], one)


def _verb(dice: Random, third: bool = False) -> Word:
    return (dice.choice(BOTH) if dice.random() < 0.7 else dice.choice(VERBS))[third], "VERB"


def _maybe(dice: Random, chance: float, words: list[Word]) -> list[Word]:
    return words if dice.random() < chance else []
