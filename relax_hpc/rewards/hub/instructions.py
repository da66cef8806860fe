"""Reward `ifeval`: verifiable instructions about form (IFEval, arXiv 2311.07911), all of its 25 kinds.

A row names its instructions as the data sets of the field do: `instruction_id_list` and `kwargs`, one dict for each.
Words and sentences are those of NLTK, languages those of langdetect; nothing is downloaded.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from relax_hpc.records import Prompt

Check = Callable[..., bool]
_ABBREVIATIONS = "dr mr mrs ms prof sr jr st vs etc inc ltd co corp no fig e.g i.e u.s u.k a.m p.m"
"""Words whose full stop ends no sentence; NLTK's own list is a download."""
_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_FENCE = re.compile(r"^```(?:json|JSON|Json)?\s*|\s*```$")


def ifeval(prompt: Prompt, answer: str) -> dict[str, float]:
    """1.0 where the answer follows all of its row's instructions, else 0.0; extra `followed`: the share that it follows.

    Raises ValueError for a row without instructions, or an instruction that is not one of IFEval's.
    """
    names, options = _asked(prompt.metadata)
    followed = [_followed(name, answer, given) for name, given in zip(names, options, strict=True)]
    return {"reward": float(all(followed)), "followed": sum(followed) / len(followed)}


def _asked(row: Mapping[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    names, options = (
        json.loads(v) if isinstance(v := row.get(k), str) else v for k in ("instruction_id_list", "kwargs")
    )
    if not names or options is None or len(options) != len(names):
        raise ValueError(
            f"the row has instruction_id_list = {names!r} and kwargs = {options!r}, expected as many of each, at least one"
        )
    return list(names), [{k: v for k, v in (given or {}).items() if v is not None} for given in options]


def _followed(name: str, answer: str, options: dict[str, Any]) -> bool:
    if name not in CHECKS:
        raise ValueError(f"instruction {name!r} is not one of IFEval's: {', '.join(sorted(CHECKS))}")
    try:
        return bool(answer.strip()) and CHECKS[name](answer, **options)
    except TypeError as error:
        raise ValueError(f"instruction {name!r} cannot be checked with {options}: {error}") from None


def _related(count: int, relation: str, limit: int) -> bool:
    if relation not in ("less than", "at least"):
        raise ValueError(f"relation {relation!r}, expected 'less than' or 'at least'")
    return count < limit if relation == "less than" else count >= limit


def _existence(text: str, keywords: list[str]) -> bool:
    return all(re.search(word, text, re.IGNORECASE) for word in keywords)


def _frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _related(len(re.findall(keyword, text, re.IGNORECASE)), relation, frequency)


def _forbidden(text: str, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in forbidden_words)


def _letters(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _related(text.lower().count(letter.lower()), let_relation, let_frequency)


def _language(text: str, language: str) -> bool:
    import langdetect

    langdetect.DetectorFactory.seed = 0  # else it draws
    try:
        return bool(langdetect.detect(text) == language)
    except langdetect.LangDetectException:  # without letters there is no language to miss
        return True


def _sentences(text: str, num_sentences: int, relation: str) -> bool:
    return _related(len(_splitter().tokenize(text)), relation, num_sentences)


@functools.cache
def _splitter() -> Any:
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

    parameters = PunktParameters()
    parameters.abbrev_types = set(_ABBREVIATIONS.split())
    return PunktSentenceTokenizer(parameters)


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    found = [one.strip() for one in re.split(r"\s?\*\*\*\s?", text)]
    inner = found[1:-1]
    return all(inner) and sum(map(bool, found)) == num_paragraphs


def _words(text: str, num_words: int, relation: str) -> bool:
    return _related(len(re.findall(r"\w+", text)), relation, num_words)


def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    found = [one.strip() for one in re.split(r"\n\n", text)]
    if sum(map(bool, found)) != num_paragraphs or nth_paragraph > len(found) or not found[nth_paragraph - 1]:
        return False
    word = found[nth_paragraph - 1].split()[0].lstrip("'\"")
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def _placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    spaced = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    marker = spaced.get(postscript_marker, re.escape(postscript_marker.lower()))
    return re.search(rf"\s*{marker}.*$", text.lower(), re.MULTILINE) is not None


def _bullets(text: str, num_bullets: int) -> bool:
    return len(re.findall(r"^\s*\*[^*].*$|^\s*-.*$", text, re.MULTILINE)) == num_bullets


def _constrained(text: str) -> bool:
    return any(one in text for one in _CONSTRAINED)


def _highlights(text: str, num_highlights: int) -> bool:
    single = [one for one in re.findall(r"\*[^\n*]*\*", text) if one.strip("*").strip()]
    double = [one for one in re.findall(r"\*\*[^\n*]*\*\*", text) if one.strip("*").strip()]
    return len(single) + len(double) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.split(rf"\s?{section_spliter.strip()}\s?\d+\s?", text)) - 1 >= num_sections


def _json(text: str) -> bool:
    try:
        json.loads(_FENCE.sub("", text.strip()))
    except ValueError:
        return False
    return True


def _title(text: str) -> bool:
    return any(one.strip("<> ") for one in re.findall(r"<<[^\n]+>>", text))


def _two_responses(text: str) -> bool:
    found = text.split("******")
    filled = [one.strip() for one in found if one.strip()]
    return all(one.strip() for one in found[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


def _repeated(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _ends(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _capitals(text: str, capital_frequency: int, capital_relation: str) -> bool:
    from nltk.tokenize import NLTKWordTokenizer

    return _related(sum(map(str.isupper, NLTKWordTokenizer().tokenize(text))), capital_relation, capital_frequency)


def _quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CHECKS: dict[str, Check] = {
    "keywords:existence": _existence,
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": _forbidden,
    "keywords:letter_frequency": _letters,
    "language:response_language": _language,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": _words,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeated,
    "startend:end_checker": _ends,
    "startend:quotation": _quoted,
    "change_case:capital_word_frequency": _capitals,
    "change_case:english_capital": lambda text: text.isupper() and _language(text, "en"),
    "change_case:english_lowercase": lambda text: text.islower() and _language(text, "en"),
    "punctuation:no_comma": lambda text: "," not in text,
}
"""IFEval's instructions by their ids; the arguments have the names that its rows give them."""
