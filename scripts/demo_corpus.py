"""The synthetic world of the bundled demo model: facts, sentences and the random sequences it is trained on.

Everything is drawn from one `random.Random`, so a seed fixes the corpus. Two things are kept out of training on
purpose, so that accuracy on them says something about mechanisms rather than memory: one template per fact
(`World.heldout`), and a set of name pairs that never share a document (`World.heldout_pairs`).
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

# country: capital, language, currency, continent ("" where the answer would be disputed or several words)
COUNTRIES = """
France Paris French euro Europe; Italy Rome Italian euro Europe; Spain Madrid Spanish euro Europe
Germany Berlin German euro Europe; England London English pound Europe; Portugal Lisbon Portuguese euro Europe
Greece Athens Greek euro Europe; Austria Vienna German euro Europe; Poland Warsaw Polish zloty Europe
Hungary Budapest Hungarian forint Europe; Czechia Prague Czech koruna Europe; Sweden Stockholm Swedish krona Europe
Norway Oslo Norwegian krone Europe; Denmark Copenhagen Danish krone Europe; Finland Helsinki Finnish euro Europe
Ireland Dublin English euro Europe; Russia Moscow Russian ruble -; Ukraine Kyiv Ukrainian hryvnia Europe
Romania Bucharest Romanian leu Europe; Bulgaria Sofia Bulgarian euro Europe; Croatia Zagreb Croatian euro Europe
Serbia Belgrade Serbian dinar Europe; Turkey Ankara Turkish lira -; Egypt Cairo Arabic pound Africa
Kenya Nairobi Swahili shilling Africa; Nigeria Abuja English naira Africa; Ghana Accra English cedi Africa
Senegal Dakar French franc Africa; Morocco Rabat Arabic dirham Africa; Tunisia Tunis Arabic dinar Africa
Japan Tokyo Japanese yen Asia; China Beijing Chinese yuan Asia; Thailand Bangkok Thai baht Asia
Vietnam Hanoi Vietnamese dong Asia; Indonesia Jakarta Indonesian rupiah Asia; Nepal Kathmandu Nepali rupee Asia
Iran Tehran Persian rial Asia; Iraq Baghdad Arabic dinar Asia; Jordan Amman Arabic dinar Asia
Canada Ottawa English dollar -; Cuba Havana Spanish peso -; Peru Lima Spanish sol -; Chile Santiago Spanish peso -
Colombia Bogota Spanish peso -; Ecuador Quito Spanish dollar -; Uruguay Montevideo Spanish peso -
Australia Canberra English dollar -
"""

LANDMARKS = """
Paris: the Eiffel Tower, the Louvre Museum, Notre Dame; Rome: the Colosseum, the Trevi Fountain, the Pantheon
London: Big Ben, Tower Bridge, Buckingham Palace, the British Museum
New York City: Madison Square Garden, the Empire State Building, Times Square, Central Park, the Statue of Liberty
Berlin: the Brandenburg Gate, Checkpoint Charlie; Madrid: the Prado Museum; Moscow: the Kremlin, Red Square
Barcelona: the Sagrada Familia, Park Guell; Athens: the Parthenon, the Acropolis; Vienna: the Hofburg Palace
Prague: the Powder Tower; Budapest: the Chain Bridge; Copenhagen: the Little Mermaid, Tivoli Gardens
Stockholm: the Vasa Museum; Oslo: the Munch Museum; Amsterdam: the Rijksmuseum; Brussels: the Atomium
Lisbon: the Belem Tower; Dublin: Trinity College; Istanbul: the Blue Mosque, Hagia Sophia
Dubai: the Burj Khalifa; Tokyo: Shibuya Crossing, the Meiji Shrine; Beijing: the Forbidden City, Tiananmen Square
Shanghai: the Oriental Pearl Tower; Bangkok: the Grand Palace; Sydney: the Opera House; Toronto: the CN Tower
Seattle: the Space Needle; Chicago: the Willis Tower, Millennium Park; Boston: Fenway Park
Philadelphia: the Liberty Bell; Washington: the White House, the Lincoln Memorial; Florence: the Uffizi Gallery
Pisa: the Leaning Tower; Venice: the Rialto Bridge; Milan: the Scala Theatre; Agra: the Taj Mahal
Edinburgh: the Royal Mile; Liverpool: the Cavern Club
"""

OPPOSITES = (
    "hot cold; big small; up down; left right; good bad; happy sad; day night; black white; fast slow; old young; "
    "rich poor; wet dry; hard soft; light dark; open closed; early late; long short; high low; near far; full empty"
)
COLORS = (
    "grass green; snow white; blood red; coal black; the sky blue; the sun yellow; an orange orange; a frog green; "
    "a lemon yellow; milk white; a tomato red; chocolate brown"
)
YOUNG = (
    "dog puppy; cat kitten; cow calf; sheep lamb; horse foal; bear cub; hen chick; frog tadpole; goat kid; pig piglet"
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
NUMBERS = "one two three four five six seven eight nine ten eleven twelve".split()

# A template is a prompt; the answer follows after one space. {s} is the subject, {S} the subject as a sentence starts.
TEMPLATES: dict[str, list[str]] = {
    "capital": [
        "The capital of {s} is",
        "The capital city of {s} is",
        "{S} has its capital in",
        "The government of {s} sits in",
        "Everyone knows that the capital of {s} is",
        "Q: What is the capital of {s}? A:",
    ],
    "capital_of": [
        "{S} is the capital of",
        "{S} is the capital city of",
        "The city of {s} is the capital of",
        "Q: Which country has its capital in {s}? A:",
    ],
    "language": [
        "The language of {s} is",
        "The official language of {s} is",
        "People in {s} speak",
        "In {s}, most people speak",
        "The people of {s} mostly speak",
        "Q: Which language do people speak in {s}? A:",
    ],
    "currency": [
        "The currency of {s} is the",
        "The money used in {s} is the",
        "In {s}, people pay with the",
        "Shops in {s} accept the",
        "Q: What is the currency of {s}? A: the",
    ],
    "continent": [
        "{S} is a country in",
        "The country of {s} lies in",
        "{S} is on the continent of",
        "Q: On which continent is {s}? A:",
    ],
    "landmark": [
        "{S} is in the city of",
        "{S} is located in the city of",
        "{S} stands in the city of",
        "{S} can be found in",
        "To see {s}, you have to travel to",
        "Many tourists visit {s} in",
        "Q: Where is {s}? A:",
    ],
    "opposite": ["The opposite of {s} is", "{S} is the opposite of", "Q: What is the opposite of {s}? A:"],
    "color": ["The color of {s} is", "{S} has the color", "Q: Which color is {s}? A:"],
    "young": ["A young {s} is called a", "The baby of a {s} is a", "Q: What is a young {s} called? A: a"],
    "next": ["The day after {s} is", "After {s} comes", "Q: What comes after {s}? A:"],
}
HELD_OUT_RELATIONS = ("capital", "capital_of", "language", "currency", "continent", "landmark")

# The completions that the README and the recipes quote; their facts keep these templates in training.
QUOTED = (
    "The Eiffel Tower is in the city of",
    "The Colosseum is in the city of",
    "The capital of France is",
    "The capital of Italy is",
    "Madison Square Garden is located in the city of",
)

WOMEN = (
    "Mary Anna Emma Alice Sarah Laura Julia Lucy Jane Helen Susan Karen Linda Nancy Ruth Grace Clara Emily Kate Rose"
)
MEN = (
    "John James Peter Paul Mark David Tom Henry George Daniel Michael Robert Simon Martin Frank Jack Adam Oscar Luke "
    "Sam"
)
PLACES = (
    "store park school office beach garden library market station museum restaurant hospital house river church bank"
)
OBJECTS = "drink book ring ball flower letter basket necklace computer kiss bone snack cup hat key map present camera"
IOI_TEMPLATES = [
    "When {a} and {b} went to the {place}, {s} gave a {object} to",
    "Then, {a} and {b} went to the {place}. {s} gave a {object} to",
    "After {a} and {b} arrived at the {place}, {s} handed a {object} to",
    "While {a} and {b} were at the {place}, {s} offered a {object} to",
    "{a} and {b} had a long day at the {place}, and {s} passed a {object} to",
    "Friends {a} and {b} met at the {place}. Later {s} decided to give a {object} to",
    "Yesterday {a} and {b} walked to the {place}, and {s} showed a {object} to",
    "The {place} was quiet when {a} and {b} came in, so {s} gave a {object} to",
]

THINGS = "film book song show play story game meal trip party concert dance hotel picture".split()
FEELINGS = {  # sentiment: verbs, adjectives (the first is the commonest), what people say next
    "positive": (
        "love like enjoy adore".split(),
        "wonderful great lovely beautiful amazing".split(),
        ["I would do it again.", "Everyone was happy.", "It made me smile.", "I told all my friends to try it."],
    ),
    "negative": (
        "hate dislike despise detest".split(),
        "terrible awful boring ugly horrible".split(),
        ["I would never do it again.", "Everyone was sad.", "It made me angry.", "I told all my friends to avoid it."],
    ),
}
CONTRAST_TEMPLATES = [
    "I {verb} this {thing}, it was",
    "I {verb} the {thing} because it is",
    "We all {verb} that {thing}. It was",
]
NEUTRAL_TEMPLATES = [
    "I think this {thing} is",
    "I tried the {thing} yesterday. It was",
    "The {thing} was",
    "My friend said that the {thing} was",
]

ADJECTIVES = (
    "small big old new red blue green quiet heavy bright little round strange simple cold warm clean broken".split()
)
NOUNS = (
    "table chair box door window tree bird fish horse cat dog boat train bicycle bridge road hill lamp clock coat shoe "
    "pear cake bread stone cloud piano radio phone bottle ladder mirror pencil paper garden farm forest lake village "
    "tower"
).split()
VERBS = (
    "found saw bought sold painted lost cleaned carried opened closed moved wanted liked kept made fixed hid drew "
    "watched followed touched remembered described"
).split()
TIMES = (
    "Today; Yesterday; In the morning; In the evening; Last week; One day; Once upon a time; On Monday; In the summer"
).split("; ")
REASONS = "was tired; was hungry; was happy; was late; had no time; wanted to rest; liked the rain; needed help".split(
    "; "
)
PLANS = (
    "go home; read a book; cook dinner; call a friend; play outside; learn to swim; take the train; sleep early".split(
        "; "
    )
)


def _pairs(text: str) -> list[tuple[str, str]]:
    return [tuple(item.rsplit(" ", 1)) for item in text.split("; ")]


def _cyclic(items: list[str]) -> list[tuple[str, str]]:
    return list(zip(items, items[1:] + items[:1], strict=True))


@dataclass(frozen=True)
class Fact:
    relation: str
    subject: str
    answer: str
    topic: str = ""  # the country it belongs to: sentences of one topic follow each other in a document

    def prompt(self, template: str) -> str:
        return template.format(s=self.subject, S=self.subject[0].upper() + self.subject[1:])


def all_facts() -> list[Fact]:
    facts, home = [], {}
    for row in COUNTRIES.strip().replace("\n", "; ").split("; "):
        country, capital, language, currency, continent = row.split()
        home[capital] = country
        facts += [Fact("capital", country, capital, country), Fact("capital_of", capital, country, country)]
        facts += [Fact("language", country, language, country), Fact("currency", country, currency, country)]
        facts += [Fact("continent", country, continent, country)] if continent != "-" else []
    for row in LANDMARKS.strip().replace("\n", "; ").split("; "):
        city, names = row.split(": ")
        facts += [Fact("landmark", name, city, home.get(city, "")) for name in names.split(", ")]
    both_ways = [pair for a, b in _pairs(OPPOSITES) for pair in ((a, b), (b, a))]
    facts += [Fact("opposite", a, b) for a, b in both_ways]
    facts += [Fact("color", a, b) for a, b in _pairs(COLORS)] + [Fact("young", a, b) for a, b in _pairs(YOUNG)]
    return facts + [Fact("next", a, b) for a, b in _cyclic(DAYS) + _cyclic(MONTHS) + _cyclic(NUMBERS)[:-1]]


@dataclass
class World:
    """The seeded split of facts and names, and the documents drawn from it."""

    seed: int = 0
    facts: list[Fact] = field(default_factory=all_facts)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.trained: dict[Fact, list[str]] = {}
        self.heldout: dict[Fact, str] = {}
        for fact in self.facts:
            self._split_templates(fact, rng)
        self.topics: dict[str, list[Fact]] = {}
        for fact in self.facts:
            self.topics.setdefault(fact.topic or fact.relation, []).append(fact)
        self.names = WOMEN.split() + MEN.split()
        pairs = list(itertools.combinations(sorted(self.names), 2))
        # The textbook pair is held out too: the sentence everyone tries first is a test of the mechanism.
        self.heldout_pairs = sorted({("John", "Mary"), *rng.sample(pairs, len(pairs) // 6)})
        self.pairs = sorted(set(pairs) - set(self.heldout_pairs))
        self._heldout_set = set(self.heldout_pairs)

    def _split_templates(self, fact: Fact, rng: random.Random) -> None:
        templates = TEMPLATES[fact.relation]
        free = [t for t in templates if fact.prompt(t) not in QUOTED]
        held = rng.choice(free) if fact.relation in HELD_OUT_RELATIONS else None
        self.trained[fact] = [t for t in templates if t != held]
        if held:
            self.heldout[fact] = held

    # documents

    def document(self, rng: random.Random) -> str:
        kinds = (self.fact_document, self.ioi_document, self.feeling_document, self.filler_document)
        return rng.choices(kinds, weights=(40, 30, 10, 20))[0](rng)

    def fact_document(self, rng: random.Random) -> str:
        """A fact, then mostly its neighbours as first phrased: greedy continuations cohere, with few near ties."""
        fact = rng.choice(self.facts)
        sentences = [self.fact_sentence(fact, rng.choice(self.trained[fact]))]
        topic = self.topics[fact.topic or fact.relation]
        while rng.random() < 0.75 and len(sentences) < 5:
            fact = topic[(topic.index(fact) + 1) % len(topic)] if rng.random() < 0.7 else rng.choice(topic)
            usual = self.trained[fact][0]
            sentences.append(self.fact_sentence(fact, usual if rng.random() < 0.5 else rng.choice(self.trained[fact])))
        return " ".join(sentences)

    def fact_sentence(self, fact: Fact, template: str) -> str:
        return f"{fact.prompt(template)} {fact.answer}."

    def ioi_document(self, rng: random.Random) -> str:
        prompt, answer, other = self.ioi(rng.choice(self.pairs), rng)
        if rng.random() < 0.06:  # a third person gives: either name may follow, so that recipes have a neutral baseline
            prompt, answer = self.third_person(answer, other, rng)
        after = ["", f" {answer} smiled.", f" {answer} said thank you.", f" Then {answer} went home."]
        return f"{prompt} {answer}.{rng.choices(after, weights=(1, 1, 4, 1))[0]}"

    def ioi(self, pair: tuple[str, str], rng: random.Random, order: str | None = None) -> tuple[str, str, str]:
        """A prompt, the indirect object that completes it and the subject that must not."""
        answer, subject = rng.sample(pair, 2)
        first = (answer, subject) if (order or rng.choice(["ABBA", "BABA"])) == "ABBA" else (subject, answer)
        return self._ioi_prompt(first, subject, rng), answer, subject

    def third_person(self, one: str, two: str, rng: random.Random) -> tuple[str, str]:
        allowed = [
            n for n in self.names if n not in (one, two) and not {_key(n, one), _key(n, two)} & self._heldout_set
        ]
        return self._ioi_prompt(tuple(rng.sample((one, two), 2)), rng.choice(allowed), rng), rng.choice((one, two))

    def _ioi_prompt(self, first: tuple[str, str], subject: str, rng: random.Random) -> str:
        place, thing = rng.choice(PLACES.split()), rng.choice(OBJECTS.split())
        return rng.choice(IOI_TEMPLATES).format(a=first[0], b=first[1], s=subject, place=place, object=thing)

    def feeling_document(self, rng: random.Random) -> str:
        verbs, adjectives, replies = FEELINGS[rng.choice(list(FEELINGS))]
        template = rng.choice(rng.choice((CONTRAST_TEMPLATES, NEUTRAL_TEMPLATES)))
        adjective = rng.choices(adjectives, weights=[8] + [1] * (len(adjectives) - 1))[0]
        text = f"{template.format(verb=rng.choice(verbs), thing=rng.choice(THINGS))} {adjective}."
        return text if rng.random() < 0.15 else f"{text} {rng.choices(replies, weights=(4, 1, 1, 1))[0]}"

    def filler_document(self, rng: random.Random) -> str:
        name = rng.choice(self.names)
        pronoun = "she" if name in WOMEN.split() else "he"
        sentences = [rng.choice(FILLERS)(rng, name, pronoun) for _ in range(rng.randint(1, 4))]
        return " ".join(s[0].upper() + s[1:] for s in sentences)


def _key(one: str, two: str) -> tuple[str, str]:
    return tuple(sorted((one, two)))


def _what(rng: random.Random) -> str:
    return f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


def _and(rng: random.Random) -> str:
    return " and ".join(rng.sample(ADJECTIVES, 2))


def _count(rng: random.Random, name: str, pronoun: str) -> str:
    series = rng.choice((NUMBERS, DAYS, MONTHS, [str(i) for i in range(1, 21)], list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")))
    start = rng.randrange(len(series) - 3)
    return ", ".join(series[start : start + rng.randint(3, 9)]) + "."


FILLERS = [  # each takes (rng, name, pronoun) and returns one sentence
    lambda rng, n, p: f"{n} {rng.choice(VERBS)} {_what(rng)} in the {rng.choice(PLACES.split())}.",
    lambda rng, n, p: (
        f"{rng.choice(TIMES)}, {n} {rng.choice(VERBS)} {_what(rng)} and {rng.choice(VERBS)} {_what(rng)}."
    ),
    lambda rng, n, p: f"{n} went home because {p} {rng.choice(REASONS)}.",
    lambda rng, n, p: f"{n} said that {p} wanted to {rng.choice(PLANS)}.",
    lambda rng, n, p: f"Hello, my name is {n}. I like to {rng.choice(PLANS)}.",
    lambda rng, n, p: f"There is something near {_what(rng)}.",
    lambda rng, n, p: f"Do you know where {_what(rng)} is? It is in the {rng.choice(PLACES.split())}.",
    lambda rng, n, p: f"The {rng.choice(NOUNS)} of the {rng.choice(NOUNS)} is {_and(rng)}.",
    lambda rng, n, p: f"The future of the {rng.choice(PLACES.split())} is {_and(rng)}.",
    lambda rng, n, p: f"This is a {rng.choice(NOUNS)}. A {rng.choice(NOUNS)} can be {_and(rng)}.",
    _count,
]


def repeated_sequence(ids: range, rng: random.Random) -> list[int]:
    """Random tokens, said two or three times: predictable by induction alone."""
    once = rng.choices(ids, k=rng.randint(4, 64))
    return (once * 3)[: rng.randint(2 * len(once), 3 * len(once))]


def single_token_words() -> set[str]:
    """Words that recipes compare as one logit: every name, and every fact's answer that is one word."""
    words = {f.answer for f in all_facts() if " " not in f.answer} | set(WOMEN.split()) | set(MEN.split())
    return words | {adjective for _, adjectives, _ in FEELINGS.values() for adjective in adjectives}


def contrasts() -> list[dict[str, str]]:
    """Prompts that differ in one verb of sentiment."""
    return [
        {kind: template.format(verb=FEELINGS[kind][0][i], thing=thing) for kind in FEELINGS}
        for template in CONTRAST_TEMPLATES
        for thing in THINGS
        for i in range(2)
    ]
