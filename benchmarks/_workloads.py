"""The three kinds of work that speculation is measured on.

A source file copied on with its beginning given (as editing does), facts listed again in another
order, and an open question. Run, it prints the open questions, a line each.
"""

from __future__ import annotations

from octavo.loader.base import Checkpoint

SOURCE = '''"""Settings of a program, kept in a file of lines "name = value"."""

import os


class Settings:
    def __init__(self, path):
        self.path = path
        self.values = {}
        self.changed = False

    def load(self):
        """Read the file; lines that begin with # are comments."""
        with open(self.path) as file:
            for line in file:
                line = line.strip()
                if not line or line.startswith("#"):
                    continue
                name, _, value = line.partition("=")
                self.values[name.strip()] = value.strip()

    def get(self, name, default=None):
        """The value of a setting, from the environment first."""
        variable = "APP_" + name.upper()
        if variable in os.environ:
            return os.environ[variable]
        return self.values.get(name, default)

    def set(self, name, value):
        """Change a setting; it is written by save()."""
        if self.values.get(name) != value:
            self.values[name] = value
            self.changed = True

    def save(self):
        """Write the file if anything was changed."""
        if not self.changed:
            return
        with open(self.path, "w") as file:
            for name, value in sorted(self.values.items()):
                file.write(f"{name} = {value}\\n")
        self.changed = False
'''
FACTS = (
    "Lisbon is the capital of Portugal and lies on the river Tagus.",
    "Vienna is the capital of Austria and lies on the river Danube.",
    "Prague is the capital of Czechia and lies on the river Vltava.",
    "Warsaw is the capital of Poland and lies on the river Vistula.",
    "Rome is the capital of Italy and lies on the river Tiber.",
    "Paris is the capital of France and lies on the river Seine.",
    "London is the capital of England and lies on the river Thames.",
    "Riga is the capital of Latvia and lies on the river Daugava.",
)
QUESTIONS = (
    "What should a visitor see in Rome, and why?",
    "How does a sailing boat move against the wind?",
    "Why do leaves change their colour in autumn?",
    "What makes bread rise, and what can go wrong?",
    "How was the distance to the moon first measured?",
    "What is the difference between a fruit and a vegetable?",
    "Write a short story about a lighthouse keeper and a storm.",
    "How can a beginner learn to play the guitar?",
)
AUDIENCES = (
    "a child of six", "a nurse", "a pilot", "an old sailor", "a judge", "a farmer", "a carpenter",
    "a school class", "a chemist", "a musician", "a tourist", "a gardener", "a policeman", "a cook",
    "a mathematician", "a goalkeeper", "a painter", "a bus driver", "a shopkeeper", "a diplomat",
    "a diver", "a beginner", "an expert", "a neighbour",
)  # fmt: skip


def workloads(checkpoint: Checkpoint, count: int, turn: int = 0) -> dict[str, list[list[int]]]:
    """Prompts of a round, all different, and other ones each ``turn``: no block is shared between
    the sequences of a batch, and none is in a prefix cache from before but a chat template's start.
    """
    encode = checkpoint.tokenizer.encode
    head = "\n".join(SOURCE.splitlines()[:8])
    numbers = range(turn * count, (turn + 1) * count)
    copy = [
        encode(
            f"# settings_{i}.py, first version\n{SOURCE}\n\n# settings_{i}.py, second version\n"
            f"{SOURCE}\n\n# settings_{i}.py, third version\n{head}\n"
        )
        for i in numbers
    ]
    again = []
    for i in numbers:
        turned = [FACTS[(i + at) % len(FACTS)] for at in range(len(FACTS))]
        text = f"List {i}:\n" + "\n".join(turned) + "\n\nSorted backwards:\n"
        text += "\n".join(reversed(turned)) + "\n\nIn another order:\n"
        again.append(encode(text + "\n".join(turned[::3]) + "\n"))
    template = checkpoint.chat_template
    open_questions = []
    for i in numbers:
        question = _question(i)
        if template is None:
            open_questions.append(encode(question))
        else:
            text = template.render(
                [{"role": "user", "content": question}], add_generation_prompt=True
            )
            open_questions.append(encode(text, add_special_tokens=False))
    return {"copy": copy, "facts": again, "chat": open_questions}


def _question(number: int) -> str:
    """First each as it is, then for each audience, then with a number."""
    question, asked = QUESTIONS[number % len(QUESTIONS)], number // len(QUESTIONS)
    if asked == 0:
        return question
    again, audience = divmod(asked - 1, len(AUDIENCES))
    start = f"{again + 1}. " if again else ""
    return f"{start}Answer as if to {AUDIENCES[audience]}: {question}"


if __name__ == "__main__":
    print("\n".join(_question(number) for number in range(len(QUESTIONS) * (1 + len(AUDIENCES)))))
