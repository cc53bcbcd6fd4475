"""Questions to train with beside invented ones: ways to ask, crossed with things to ask about."""

from __future__ import annotations

import random

_ABOUT = (
    "How does {} work?",
    "Explain {} to a ten-year-old.",
    "What is {}, in simple words?",
    "What is the history of {}?",
    "Why does {} matter today?",
    "What are common mistakes about {}?",
    "Give me five facts about {}.",
    "What are the advantages and disadvantages of {}?",
    "Write a short paragraph about {}.",
    "What should everybody know about {}?",
    "Summarize the main ideas behind {}.",
    "How has {} changed over the last hundred years?",
    "What questions about {} are still open?",
    "Write an introduction to an article about {}.",
    "What is a good example of {}, and what does it show?",
)
_TOPICS = (
    "gravity", "photosynthesis", "inflation", "the immune system", "electricity", "a battery",
    "the water cycle", "a volcano", "plate tectonics", "the printing press", "a steam engine",
    "democracy", "the Roman army", "the Silk Road", "the French Revolution", "the Renaissance",
    "machine learning", "encryption", "the internet", "a database", "version control", "recursion",
    "a compiler", "open source software", "a search engine", "the stock market", "insurance",
    "supply and demand", "a central bank", "compound interest", "evolution", "DNA", "bacteria",
    "vaccination", "sleep", "memory", "the human heart", "digestion", "nutrition", "meditation",
    "jazz music", "classical music", "opera", "photography", "painting with oil", "poetry",
    "the theatre", "architecture", "chess", "football", "the Olympics", "long-distance running",
    "swimming", "cycling", "mountain climbing", "cheese making", "coffee", "tea", "chocolate",
    "olive oil", "fermentation", "gardening", "beekeeping", "recycling", "solar energy",
    "wind power", "nuclear power", "climate change", "deforestation", "coral reefs", "whales",
    "elephants", "wolves", "migratory birds", "ants", "spiders", "dinosaurs", "fossils",
    "black holes", "the solar system", "Mars", "comets", "telescopes", "satellites", "rockets",
    "airplanes", "railways", "bridges", "canals", "maps", "the calendar",
    "clocks", "money", "writing systems", "translation", "public libraries", "universities",
    "public transport", "traffic lights", "city parks", "earthquakes", "hurricanes", "glaciers",
    "deserts", "rain forests", "rivers", "oceans", "sound", "light", "colour vision", "magnets",
    "probability", "prime numbers", "geometry", "statistics", "logic", "ethics", "stoicism",
)  # fmt: skip
_HOW = (
    "How do I {}?",
    "Give me a step-by-step plan to {}.",
    "What do I need to {}?",
    "What are three tips for somebody who wants to {}?",
    "I would like to {}. Where should I start?",
    "Why is it hard to {}, and what helps?",
    "Write a friendly email in which you offer to {}.",
    "Make a checklist for someone about to {}.",
)
_DEEDS = (
    "learn a new language", "plan a weekend trip", "write a good résumé", "prepare for an exam",
    "save money every month", "start a small business", "organize a birthday party",
    "cook a vegetarian dinner", "make tomato soup", "bake a chocolate cake", "grow tomatoes",
    "repair a bicycle", "paint a room", "clean a kitchen", "train a puppy", "adopt a cat",
    "read more books", "write a novel", "give a speech", "make new friends", "sleep better",
    "drink less coffee", "run a marathon", "lose weight in a healthy way", "do push-ups",
    "learn to swim", "play the piano", "draw a portrait", "take better photographs",
    "build a website", "write a Python function", "debug a program", "sort a list of numbers",
    "learn algebra", "teach children to read", "lead a team", "prepare for a job interview",
    "ask for a raise", "manage my time", "stop procrastinating", "reduce stress", "pack a suitcase",
    "move to another city", "rent an apartment", "buy a used car", "use less plastic",
    "save energy at home", "set up a home office", "volunteer in the neighbourhood",
    "organize a book club", "keep a diary", "brew tea properly", "make pancakes", "cook rice",
)  # fmt: skip
_WRITE = (
    "Write a short story about {}.",
    "Write a poem about {}.",
    "Describe {} in detail.",
    "Write the first page of a novel about {}.",
    "Write a dialogue between two friends about {}.",
    "Invent a fairy tale about {}.",
    "Write a letter to {}.",
)
_SUBJECTS = (
    "a lost dog", "a robot that dreams", "an old clockmaker", "a train in the snow",
    "a girl who talks to birds", "a village by the sea", "a library at night", "a brave mouse",
    "a teacher on the last day of school", "two brothers and a boat", "an astronaut far from home",
    "a dragon that is afraid of fire", "a baker in Paris", "a market in Morocco",
    "a detective without a case", "the first day of spring", "a garden behind a wall",
    "a musician who lost her hearing", "a king without a crown", "a forest after the rain",
    "a letter that came too late", "a grandmother's kitchen", "a fisherman and his son",
    "a city under water", "a young inventor", "a wizard who forgot his spells", "a winter morning",
    "a football team that never won", "an island without a name", "the last bookshop in town",
)  # fmt: skip
_COMPARE = (
    "What is the difference between {} and {}?",
    "Compare {} and {}.",
    "Which is better for a beginner, {} or {}, and why?",
)
_PAIRS = (
    ("Python", "JavaScript"), ("a virus", "a bacterium"), ("weather", "climate"),
    ("cats", "dogs"), ("tea", "coffee"), ("a crocodile", "an alligator"), ("jam", "jelly"),
    ("a novel", "a short story"), ("the violin", "the cello"), ("tennis", "badminton"),
    ("saving", "investing"), ("a lake", "a pond"), ("mass", "weight"), ("a comet", "an asteroid"),
    ("baking", "frying"), ("yoga", "pilates"), ("a democracy", "a republic"),
    ("solar power", "wind power"), ("a bus", "a tram"), ("Spanish", "Italian"),
    ("oil paint", "watercolours"), ("a list", "a dictionary in Python"), ("RAM", "a hard disk"),
    ("butter", "margarine"), ("a moth", "a butterfly"), ("running", "cycling"),
)  # fmt: skip
_PLACES = (
    "Paris", "London", "Berlin", "Madrid", "Lisbon", "Vienna", "Prague", "Athens", "Istanbul",
    "Cairo", "Nairobi", "Mumbai", "Tokyo", "Beijing", "Sydney", "New York", "San Francisco",
    "Mexico City", "Buenos Aires", "Reykjavik", "the Alps", "the Grand Canyon", "Scotland",
)  # fmt: skip
_VISIT = (
    "What is {} famous for?",
    "Plan three days in {} for a family.",
    "What is the best time of the year to travel to {}?",
    "Describe the food of {}.",
)


def prompts(count: int = 1 << 31, seed: int = 0) -> list[str]:
    """So many different ones, or all there are."""
    everything = [way.format(topic) for way in _ABOUT for topic in _TOPICS]
    everything += [way.format(deed) for way in _HOW for deed in _DEEDS]
    everything += [way.format(subject) for way in _WRITE for subject in _SUBJECTS]
    everything += [way.format(*pair) for way in _COMPARE for pair in _PAIRS]
    everything += [way.format(place) for way in _VISIT for place in _PLACES]
    return random.Random(seed).sample(everything, min(count, len(everything)))
