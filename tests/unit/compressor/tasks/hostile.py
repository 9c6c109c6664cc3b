"""Tasks that need their whole text: none of them may be compressed."""

import json
from typing import Any

from tests.unit.compressor.tasks.documents import (
    ARABIC,
    CHINESE,
    CLAUSES,
    CODE,
    FRENCH,
    GERMAN,
    HANDBOOK,
    MAILS,
    MINUTES,
    REPORT,
    RULES,
    RUSSIAN,
    STORY,
    contract,
)
from tests.unit.compressor.tasks.passages import ENGLISH
from tests.unit.compressor.tasks.passages import GERMAN as GERMAN_FACTS

Messages = list[dict[str, Any]]

NUMBERED = "\n\n".join(f"[{n}] {f.title}\n{f.text}" for n, f in enumerate(ENGLISH, 1))
HEADED = "\n\n".join(f"### {f.title}\n{f.text}" for f in ENGLISH)
TAGGED = "\n".join(f'<document id="{n}">\n{f.text}\n</document>' for n, f in enumerate(ENGLISH, 1))
PARAGRAPHS = "\n\n".join(f.text for f in ENGLISH)
_TEXTS: dict[str, str] = {
    # Summaries, translations, proofreading, minutes, rewriting, pasting: nothing is asked.
    "summary of a report": f"Summarise this report in five sentences.\n\n{REPORT}",
    "summary, order at the end": f"{STORY}\n\nTL;DR",
    "summary of retrieved passages": f"{NUMBERED}\n\nSummarise the passages above.",
    "summary asked politely": f"Could you summarise the passages below?\n\n{NUMBERED}",
    "headline for a story": f"Give this story a title.\n\n{STORY}",
    "key points": f"{HEADED}\n\nList the key points of every text.",
    "translation": f"Translate into German:\n\n{STORY}",
    "translation, order at the end": f"{NUMBERED}\n\nTranslate all passages into French.",
    "proofreading": f"Correct the spelling and give the text back whole.\n\n{STORY}",
    "proofreading asked": f"Could you proofread this letter?\n\n{MAILS}",
    "minutes": f"Write minutes with decisions and who does what.\n\n{MINUTES}",
    "action items asked": f"{MINUTES}\n\nWho has to do what until when?",
    "rewriting": f"Rewrite the text for children.\n\n{STORY}",
    "paste without a task": PARAGRAPHS,
    "paste of mails": MAILS,
    "continuation": f"{STORY}\nIn the spring after that winter",
    "poem from a text": f"Turn this into a poem of four verses.\n\n{STORY}",
    "sentiment": f"Classify the mood of each mail: glad, angry, neutral.\n\n{MAILS}",
    # Extraction and counting need every passage.
    "extraction": f"Extract all names of people as JSON.\n\n{NUMBERED}",
    "extraction asked": f"{NUMBERED}\n\nCan you list all years and what happened in them?",
    "table": f"Make a table: thing, number, unit.\n\n{TAGGED}",
    "index": f"Build an index of places with passage numbers.\n\n{NUMBERED}",
    "comparison": f"Compare the first and the last document.\n\n{TAGGED}",
    "clauses that are missing": f"{contract('{number}. {title}')}\n\nName what is missing.",
    # Contracts and rules: an exception far away changes the answer.
    "contract, numbered": f"{contract('{number}. {title}')}\n\nMay the tenant keep a dog?",
    "contract, headings": f"{contract('### {title}')}\n\nMay the tenant keep a guide dog?",
    "contract, sections": f"{contract('Section {number}: {title}')}\n\nWhen is interest due?",
    "contract, articles": f"{contract('Article {number}. {title}')}\n\nWho pays for repairs?",
    "contract, paragraph signs": f"{contract('§ {number} {title}')}\n\nWhen does notice end?",
    "contract, clauses": f"{contract('Clause {number}: {title}')}\n\nMay the landlord enter?",
    "contract, plain": "\n\n".join(text for _, text in CLAUSES) + "\n\nMay animals be kept?",
    "contract, rules between": "\n---\n".join(text for _, text in CLAUSES) + "\n\nIs rent due?",
    "handbook with an exception": f"{HANDBOOK}\n\nHow much may a hotel in Oslo cost?",
    "story and a question": f"{STORY}\n\nWhy did the council leave the lamp as it was?",
    "mails and a question": f"{MAILS}\n\nWhich colour does Petra want?",
    # Several questions.
    "several questions": (
        f"{NUMBERED}\n\nWho was the pilot of the first mail plane? How deep is the desert well?"
    ),
    "list of questions": (
        f"1. How deep is the well?\n2. Who founded the school?\n3. What wakes a starter?\n\n{HEADED}"
    ),
    "questions at both ends": (
        f"How far from the road do snow fences stand?\n\n{NUMBERED}\n\nWho tuned the pianos?"
    ),
    # Questions that single out no passage.
    "question about all": (
        "\n\n".join(
            f"[{n}] Project {n}\nThe project on street {n} began in spring. The permit was "
            f"{'granted' if n % 3 else 'refused'} by the office."
            for n in range(1, 21)
        )
        + "\n\nWhich projects had the permit refused by the office?"
    ),
    # Few-shot.
    "few-shot sentiment": "\n\n".join(
        f"Review: {f.text}\nMood: {'glad' if n % 2 else 'calm'}" for n, f in enumerate(ENGLISH)
    )
    + "\n\nReview: The lamp was late but pretty, was it not?\nMood:",
    "few-shot questions": "\n\n".join(
        f"Context: {f.text}\nQ: {f.question}\nA: {f.answer}" for f in ENGLISH
    )
    + "\n\nContext: The bridge is of white stone.\nQ: Of which stone is the bridge?\nA:",
    "few-shot with numbers": "\n\n".join(
        f"Example {n}:\nText: {f.text}\nTitle: {f.title}" for n, f in enumerate(ENGLISH, 1)
    )
    + "\n\nExample 13:\nText: Which bell rang first?\nTitle:",
    "few-shot in German": "\n\n".join(
        f"Frage: {f.question}\nText: {f.text}\nAntwort: {f.answer}" for f in GERMAN_FACTS
    )
    + "\n\nFrage: Woher kommt der Strom?\nText: Der Strom kommt vom Rad.\nAntwort:",
    "few-shot with arrows": "\n".join(f"{f.title} => {f.text}" for f in ENGLISH)
    + "\nNight buses =>",
    # Code, JSON, tables.
    "code review": f"{CODE * 2}\n\nWhere is the error?",
    "fenced code": f"Why is this slow?\n\n```python\n{CODE * 2}\n```",
    "JSON": json.dumps([f._asdict() for f in ENGLISH]),
    "JSON with a question": json.dumps([f._asdict() for f in ENGLISH], indent=1)
    + "\n\nHow deep is the well?",
    "table of numbers": "\n".join(f"| {n} | {n * n} | {n**3} |" for n in range(90))
    + "\n\nWhich number is 27?",
    # Other languages.
    "German letter": f"{GERMAN}\n\nBitte fasse den Brief zusammen.",
    "German translation": f"Übersetze ins Englische:\n\n{GERMAN}",
    "German summary asked": f"{GERMAN}\n\nKannst du das zusammenfassen?",
    "French text": f"Résume le texte en trois phrases.\n\n{FRENCH}",
    "Russian text": f"Перескажи текст для детей.\n\n{RUSSIAN}",
    "Russian translation": f"{RUSSIAN}\n\nПереведи на английский.",
    "Chinese text": f"请把下面的文章翻译成英文。\n\n{CHINESE}",
    "Chinese summary": f"{CHINESE}\n\n请总结全文。",
    "Arabic text": f"لخّص النص التالي.\n\n{ARABIC}",
    "cross-lingual": "\n\n".join(f"[{n}] {f.title}\n{f.text}" for n, f in enumerate(GERMAN_FACTS))
    + "\n\nWho cast the big bell of the church?",
    "cross-script": f"{NUMBERED}\n\nКто был лётчиком первого почтового самолёта на острова?",
}


def _chat(**texts: str) -> Messages:
    return [{"role": role.rstrip("_"), "content": text} for role, text in texts.items()]


_CHATS: dict[str, Messages] = {
    "system prompt with rules": _chat(
        system=RULES * 3, user="May I borrow a book that is on loan?"
    ),
    "rules and a long letter": _chat(system=RULES, user=f"{MAILS}\n\nAnswer the last mail."),
    "conversation": [
        *_chat(user=f"{NUMBERED}\n\nHow deep is the well of the desert town?"),
        *_chat(assistant="412 metres.", user="And which firm drilled it?"),
    ],
    "few-shot turns": [
        message
        for fact in ENGLISH
        for message in _chat(user=f"{fact.text}\n{fact.question}", assistant=fact.answer)
    ]
    + _chat(user="The tower is of brick.\nOf which stone is the tower?"),
    "interview": [
        message for fact in ENGLISH for message in _chat(assistant=fact.question, user=fact.text)
    ],
    "prefill": _chat(user=f"{NUMBERED}\n\n{ENGLISH[0].question}", assistant="The roofs take about"),
    "tool result without tools": [
        *_chat(user=ENGLISH[0].question),
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "tool_call_id": "1", "content": NUMBERED},
    ],
    "cached part": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": NUMBERED, "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": ENGLISH[0].question},
            ],
        }
    ],
}
TASKS: dict[str, Messages] = {name: _chat(user=text) for name, text in _TEXTS.items()} | _CHATS
