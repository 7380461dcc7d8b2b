"""Ask questions on retrieved passages: start ``tidemill up``, then run this file.

Each question comes with the passages that a search found for it, best first.  In that order hardly
two prompts begin alike; in canonical order they share their passages, and each is computed once.
"""

from tidemill import Producer, Result, TidemillError
from tidemill.rag import PromptBuilder, expected_savings, order_fields

MOON = (
    "The moon's pull raises two bulges of water on the earth, one on the side of the moon and one"
    " on the other. A coast passes both in a day, so most coasts have two high waters a day."
)
SUN = (
    "The sun raises tides too, less than half as high as the moon's. At full and new moon both"
    " add up to spring tides; at half moon they work against each other, and neap tides follow."
)
MILL = (
    "A tide mill stores the water of the high tide behind a dam and lets it out over a wheel when"
    " the sea has fallen. It works about ten hours a day, at hours that the moon decides."
)

#: Question -> passages in the order of their relevance.
RETRIEVED = {
    "How often is the water high?": [MOON, SUN],
    "When are spring tides?": [SUN, MOON],
    "What does a tide mill need?": [MILL, MOON, SUN],
    "Why do a mill's hours change?": [MOON, MILL],
    "Which tides are weak?": [SUN, MOON],
}

TEMPLATE = "Answer from the passages.\n\n{{chunks}}\n\nQuestion: {{question}}\nAnswer:"

REVIEWS = [
    {"text": "Runs well.", "product": "Tide wheel, oak, 3 m, for dams up to 2 m", "stars": 5},
    {"text": "Too loud.", "product": "Mill stone, granite, 1.2 m, dressed", "stars": 2},
    {"text": "Turns easily.", "product": "Tide wheel, oak, 3 m, for dams up to 2 m", "stars": 5},
    {"text": "Grinds fine.", "product": "Mill stone, granite, 1.2 m, dressed", "stars": 5},
]


def passages() -> list[str]:
    """Return the prompts over passages, and tell what their order saves."""
    chunks = list(RETRIEVED.values())
    fields = [{"question": question} for question in RETRIEVED]
    as_found = [
        TEMPLATE.replace("{{chunks}}", "\n\n".join(found)).replace("{{question}}", question)
        for question, found in RETRIEVED.items()
    ]
    prompts = PromptBuilder(TEMPLATE).build(chunks, fields)
    print(f"as found:        {expected_savings(as_found)}")
    print(f"canonical order: {expected_savings(prompts)}")
    return prompts


def table() -> list[str]:
    """Return the prompts over the rows of a table, the fields that rows share first."""
    rows = order_fields(REVIEWS)
    prompts = [f"A review:\n{row.text()}\nIs the customer content? Answer:" for row in rows]
    print(f"table rows:      {expected_savings(prompts)}\n")
    return prompts


def main() -> None:
    """Answer everything as batch work, then take the longest of four answers to one question."""
    prompts = [*passages(), *table()]
    with Producer() as producer:
        results = list(producer.map(prompts, priority=1, max_tokens=16, temperature=0))
        for question, result in zip(RETRIEVED, results, strict=False):
            print(f"{question} {result.text.strip()}")
        tell("all prompts", results)

        best = producer.submit_best_of(prompts[0], n=4, max_tokens=24)
        print(f"\nlongest of 4: {best.best(lambda result: len(result.text)).text.strip()}")
        tell("4 candidates", best.results())


def tell(what: str, results: list[Result]) -> None:
    """Print how many prompt tokens were computed."""
    total = sum(result.usage.prompt_tokens for result in results)
    cached = sum(result.usage.cached_tokens for result in results)
    print(f"-- {what}: {total - cached} of {total} prompt tokens computed")


if __name__ == "__main__":
    try:
        main()
    except TidemillError as error:
        raise SystemExit(error.one_line()) from None
