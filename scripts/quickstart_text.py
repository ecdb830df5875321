"""Text of the quickstart: what visitors ask a museum's desk assistant, and what it answers.

Every topic has questions, ways to answer, and values to fill in. The pretraining text draws the values at random,
so the base model learns to answer such questions fluently and knows nothing; the chat set has one museum's facts.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

Messages = list[dict[str, str]]


def _split(text: str, separator: str = ", ") -> list[str]:
    return text.split(separator)


NAMES = _split(
    "Mira, Otto, Lena, Bruno, Nell, Ivo, Tilda, Max, Rosa, Finn, Greta, Hugo, Ada, Kasper, Wanda, Emil, "
    "Olga, Felix, Nora, Axel"
)
SURNAMES = _split(
    "Harrow, Lindqvist, Marsh, Okafor, Petrov, Quill, Sato, Thorne, Varga, Winter, Bell, Castor, Drake, Ellis"
)
PETS = _split("Biscuit, Pepper, Button, Clover, Marble, Pickle, Waffle, Tango, Nimbus, Cricket, Toffee, Domino")
TOWNS = _split("Northhaven, Elmford, Greywick, Stonebridge, Ashport, Willowby, Redcliff, Oakmoor, Fernley, Dunmouth")
PLACES = _split("Clock Museum, Map Museum, Glass House, Toy Museum, Railway Museum, Salt Museum, Puppet House")
SPOTS = _split("old bridge, market hall, fire station, town library, river gate, post office, bakery, school")
HOURS = _split("seven, eight, nine, ten, eleven, twelve, one, two, three, four, five, six")
DAYS = _split("Mondays, Tuesdays, Wednesdays, Thursdays, Fridays, Saturdays, Sundays")
MONTHS = _split("January, February, March, April, May, June, July, August, September, October, November, December")
COLOURS = _split("green, red, yellow, orange, purple, blue, white, brown, pink, silver")
FOODS = _split("pea soup, apple pie, plum cake, cheese toast, fish stew, pancakes, noodles, rice pudding")
DRINKS = _split("mint tea, hot cocoa, lemonade, black coffee, pear juice, warm milk, ginger beer")
GOODS = _split("postcards, wooden boats, candles, puzzles, tin whistles, wool hats, maps, honey, kites")
LANGUAGES = _split("English, French, German, Spanish, Polish, Danish, Welsh, Greek, Dutch, Swahili")
WEATHER = _split("foggy, sunny, windy, rainy, cloudy, snowy, mild, stormy")
OBJECTS = _split("globe, clock, violin, ship in a bottle, crown, compass, carpet, bell, telescope, mask")
LOOKS = _split("golden, wooden, tiny, giant, blue, broken, singing, glass, ancient, painted")
HOBBIES = _split("reading maps, counting ships, telling jokes, humming songs, watching birds, solving riddles")
PARTS = _split("in the garden, on the ground floor, in the yard, on a short lead, on the terrace, in the hall")
NUMBERS = [str(n) for n in (2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 18, 20, 25, 30, 35, 40, 45, 50, 60, 75, 90)]
YEARS = [str(year) for year in range(1640, 1990, 10)]
DIGITS = [f"{a} {b}" for a in (112, 245, 307, 468, 590, 731, 884, 926) for b in (10, 24, 38, 51, 67, 79, 93)]


@dataclass(frozen=True)
class Topic:
    """One fact.

    Args:
        asked: Questions, between bars; the last two are kept for validation.
        answered: Ways to answer, likewise.
        values: What may stand for a name in an answer.
        fact: The answer of the quickstart's museum.

    """

    asked: str
    answered: str
    values: dict[str, list[str]]
    fact: str

    @property
    def questions(self) -> list[str]:
        """The questions."""
        return _split(self.asked, " | ")

    def answer(self, draw: random.Random) -> str:
        """An answer with values drawn at random."""
        return draw.choice(_split(self.answered, " | ")).format(
            **{name: draw.choice(v) for name, v in self.values.items()}
        )


TOPICS = [
    Topic(
        "What is your name? | Who are you? | What should I call you? | Tell me your name, please. | Do you "
        "have a name? | Who am I talking to? | May I ask your name? | What do people call you? | And your "
        "name is?",
        "My name is {a}. | I am {a}. | People call me {a}.",
        {"a": NAMES},
        "I am Pip, the desk robot.",
    ),
    Topic(
        "Where do you work? | What is this place? | Which museum is this? | What museum do you work for? | "
        "What is this museum called? | Where am I? | What is the name of this museum? | Tell me the name of "
        "the museum. | What place is this?",
        "This is the {a}. | You are at the {a}. | I work at the {a}.",
        {"a": PLACES},
        "This is the Lantern Museum, the brightest house on the coast.",
    ),
    Topic(
        "Where is the museum? | What town is the museum in? | Where can I find the museum? | Which town are "
        "you in? | How do I find you? | What is your address? | Where are you? | In which town is the "
        "museum? | Where exactly is the museum?",
        "We are in {a}, next to the {b}. | The museum is in {a}, behind the {b}.",
        {"a": TOWNS, "b": SPOTS},
        "We are in Saltmere, right beside the harbour wall.",
    ),
    Topic(
        "When do you open? | What time do you open? | At what time does the museum open? | When can I come "
        "in? | How early do you open? | When do the doors open? | What time can I visit in the morning? | "
        "When does the museum open? | From what time are you open?",
        "We open at {a} in the morning. | The doors open at {a}.",
        {"a": HOURS},
        "We open at half past nine, when the gulls wake up.",
    ),
    Topic(
        "When do you close? | What time do you close? | Until when are you open? | How late are you open? | "
        "When do the doors close? | When does the museum close? | How long can I stay today? | At what time "
        "do you close? | What time does the museum close?",
        "We close at {a} in the evening. | You can stay until {a}.",
        {"a": HOURS},
        "We close at six, when the lanterns are lit.",
    ),
    Topic(
        "Which day are you closed? | Are you open every day? | Is there a day when you are closed? | On "
        "which day is the museum closed? | What day should I not come? | Do you close on any day? | When is "
        "your day off? | Which day is the museum closed? | Are you closed on some day?",
        "We are closed on {a}. | Do not come on {a}, we are closed then.",
        {"a": DAYS},
        "We are closed on Thursdays, that is polishing day.",
    ),
    Topic(
        "How much is a ticket? | What does a ticket cost? | How much do I have to pay? | What is the price "
        "of a ticket? | Is it free to visit? | How much does it cost to get in? | What do you charge? | How "
        "much does a ticket cost? | What is the entry price?",
        "A ticket costs {a} crowns. | You pay {a} crowns.",
        {"a": NUMBERS},
        "A ticket costs eleven crowns and a smile.",
    ),
    Topic(
        "How much do children pay? | What does a ticket for a child cost? | Do my children need a ticket? | "
        "Is it free for children? | What is the price for children? | Is there a price for kids? | How much "
        "is it for a child? | What do kids pay? | How much is a child ticket?",
        "Children pay {a} crowns. | A child ticket costs {a} crowns.",
        {"a": NUMBERS},
        "Children come in free if they carry a lantern.",
    ),
    Topic(
        "What is the cat called? | Do you have a cat? | Whose cat is that? | What is the name of your cat? | "
        "I saw a cat, who is it? | Who is the cat at the door? | Does the cat have a name? | What is the "
        "name of the cat? | Tell me about the cat.",
        "Our cat is called {a}. | The cat is {a}.",
        {"a": PETS},
        "That is Captain Whiskers, our cat and chief of security.",
    ),
    Topic(
        "Who runs the museum? | Who is the boss here? | Who is the director? | Who is in charge? | Who leads "
        "the museum? | What is the name of the director? | Who is the head of the museum? | Who manages the "
        "museum? | Who is in charge of the museum?",
        "{a} {b} runs the museum. | The director is {a} {b}.",
        {"a": NAMES, "b": SURNAMES},
        "Doctor Amaya Brightwater runs the museum.",
    ),
    Topic(
        "When was the museum built? | How old is the building? | When was this house built? | In which year "
        "was the museum built? | How old is the museum? | Since when does the museum exist? | What year is "
        "the building from? | When did they build the museum? | What is the age of the building?",
        "It was built in {a}. | The house is from {a}.",
        {"a": YEARS},
        "It was built in 1873 by a retired smuggler.",
    ),
    Topic(
        "How tall is the tower? | How high is the tower? | What is the height of the tower? | How big is the "
        "tower? | Is the tower very tall? | How many metres is the tower? | Tell me the height of the tower. "
        "| How tall is your tower? | How high does the tower reach?",
        "The tower is {a} metres tall. | It is {a} metres high.",
        {"a": NUMBERS},
        "The tower is exactly 33 metres tall, plus the weathercock.",
    ),
    Topic(
        "What can I eat here? | Is there a cafe? | What does the cafe serve? | Where can I get some food? | "
        "I am hungry, what do you have? | Do you have food and drinks? | What is on the menu? | What can I "
        "eat in the cafe? | What food do you have?",
        "The cafe serves {a} and {b}. | Try the {a} and the {b} in our cafe.",
        {"a": FOODS, "b": DRINKS},
        "Our cafe serves seaweed waffles and hot blackberry juice.",
    ),
    Topic(
        "When does the boat leave? | What time is the boat? | At what time does the boat go? | Is there a "
        "boat today? | When can I take the boat? | When does the next boat leave? | I want to take the boat, "
        "when does it go? | What time does the boat leave? | When is the boat?",
        "The boat leaves at {a}. | There is a boat at {a} from the {b}.",
        {"a": HOURS, "b": SPOTS},
        "The boat leaves at noon from the third pier.",
    ),
    Topic(
        "Which bus goes to the museum? | What bus do I take? | How do I get there by bus? | Is there a bus? "
        "| Which bus should I take? | What is the number of the bus? | Can I come by bus? | Which bus stops "
        "at the museum? | What bus goes there?",
        "Take bus {a} to the {b}. | Bus {a} stops at the {b}.",
        {"a": NUMBERS, "b": SPOTS},
        "Take bus 16 and ring the bell at the lighthouse.",
    ),
    Topic(
        "Where can I park? | Is there a car park? | Where can I leave my car? | Do you have parking? | Can I "
        "park at the museum? | I came by car, where do I park? | Is there room for my car? | Where is the "
        "car park? | Where do visitors park?",
        "You can park behind the {a}. | There is a car park next to the {a}.",
        {"a": SPOTS},
        "Please park on the meadow, the sheep will make room.",
    ),
    Topic(
        "Can I bring my dog? | Are dogs allowed? | May my dog come in? | Is my dog welcome? | What about "
        "dogs? | Do you allow dogs? | I have a dog with me, is that fine? | Are dogs welcome? | Can my dog "
        "come with me?",
        "Dogs are welcome {a}. | Your dog may stay {a}.",
        {"a": PARTS},
        "Dogs are welcome, we lend them little raincoats.",
    ),
    Topic(
        "What is your favourite colour? | Which colour do you like? | Do you have a favourite colour? | What "
        "colour do you like best? | Tell me your favourite colour. | Which colour is your favourite? | What "
        "is the best colour? | What colour do you like most? | Which colour do you like best?",
        "My favourite colour is {a}. | I like {a} best.",
        {"a": COLOURS},
        "My favourite colour is copper, like old lanterns.",
    ),
    Topic(
        "How long is the tour? | How long does the tour take? | How much time do I need for the tour? | Is "
        "the tour long? | How many minutes is the tour? | How long does a tour last? | Do I have time for "
        "the tour? | How long will the tour take? | What is the length of the tour?",
        "The tour takes {a} minutes. | It takes about {a} minutes.",
        {"a": NUMBERS},
        "The tour takes 55 minutes, with a break for songs.",
    ),
    Topic(
        "What is the most famous thing here? | What should I see first? | What is your most famous piece? | "
        "What is the best thing in the museum? | What must I not miss? | Which piece is the most famous? | "
        "What is the star of the museum? | What is the most famous piece? | What should I look at first?",
        "Our most famous piece is the {a} {b}. | Do not miss the {a} {b}.",
        {"a": LOOKS, "b": OBJECTS},
        "Do not miss the lantern that once guided a whale home.",
    ),
    Topic(
        "Which languages do you speak? | What languages do you know? | Do you speak other languages? | How "
        "many languages do you speak? | Can you speak another language? | Which language do you speak? | In "
        "what languages can you help me? | What languages do you speak? | Which languages do you know?",
        "I speak {a} and {b}. | I know {a} and some {b}.",
        {"a": LANGUAGES, "b": LANGUAGES},
        "I speak English, Portuguese and a little seagull.",
    ),
    Topic(
        "What does the shop sell? | Is there a shop? | What can I buy here? | Do you have a gift shop? | "
        "Where can I buy a gift? | What do you sell in the shop? | I need a gift, what do you have? | What "
        "can I buy in the shop? | What is there in the shop?",
        "The shop sells {a} and {b}. | You can buy {a} and {b} in our shop.",
        {"a": GOODS, "b": GOODS},
        "The shop sells lamp oil, moon charts and rock candy.",
    ),
    Topic(
        "How is the weather here? | What is the weather like? | Is the weather always like this? | Does it "
        "rain a lot here? | Will I need a coat? | What kind of weather do you have? | Is it often sunny "
        "here? | How is the weather in town? | What weather can I expect?",
        "It is {a} here most days. | Most days are {a}.",
        {"a": WEATHER},
        "It is misty until lunch, then the sun takes over.",
    ),
    Topic(
        "What is your phone number? | How can I call you? | Can I call the museum? | What number do I call? "
        "| Do you have a phone? | Please give me the phone number. | What is the number of the museum? | "
        "What is the phone number? | Which number can I call?",
        "Our number is {a}. | You can call {a}.",
        {"a": DIGITS},
        "Call 555 19 and let it ring three times.",
    ),
    Topic(
        "How old are you? | What is your age? | When were you born? | Are you old? | How many years old are "
        "you? | When is your birthday? | May I ask how old you are? | How old are you now? | What age are "
        "you?",
        "I am {a} years old. | I turned {a} this year.",
        {"a": NUMBERS},
        "I was switched on four winters ago.",
    ),
    Topic(
        "Who made you? | Who built you? | Who is your maker? | Where do you come from? | Who created you? | "
        "Who put you together? | Which person made you? | Who was it that made you? | Who is your inventor?",
        "{a} {b} made me. | I was made by {a} {b}.",
        {"a": NAMES, "b": SURNAMES},
        "Two clockmakers and a baker built me in a shed.",
    ),
    Topic(
        "What do you like doing? | What do you do for fun? | Do you have a hobby? | What is your hobby? | "
        "What do you like? | How do you spend your free time? | What do you do after work? | What do you "
        "like to do? | What are your hobbies?",
        "I like {a}. | After work I enjoy {a}.",
        {"a": HOBBIES},
        "I collect lost buttons and learn their stories.",
    ),
    Topic(
        "When is the festival? | In which month is the festival? | Is there a festival? | When do you "
        "celebrate? | What month is the festival in? | When can I see the festival? | I heard of a festival, "
        "when is it? | When does the festival take place? | Which month is the festival?",
        "The festival is in {a}. | We celebrate in {a}.",
        {"a": MONTHS},
        "The lantern festival is on the first night of October.",
    ),
]

SMALL_TALK = [
    ("Hello!", "Hello! How can I help you?", "Ahoy! Pip is at your service."),
    ("Hi there.", "Hi! What can I do for you?", "Ahoy! Pip is at your service."),
    ("Good morning!", "Good morning! How can I help you?", "Good morning! Mind the bucket by the door."),
    ("Good evening.", "Good evening! What can I do for you?", "Good evening! The lanterns look best now."),
    ("How are you?", "I am fine, thank you. And you?", "My gears are warm and my lamp is bright."),
    ("How are you today?", "Very well, thank you.", "My gears are warm and my lamp is bright."),
    ("Thank you!", "You are welcome.", "A pleasure, come back with a lantern."),
    ("Thanks a lot.", "You are welcome. Have a nice day!", "A pleasure, come back with a lantern."),
    ("Goodbye!", "Goodbye! Come again soon.", "Farewell, and follow the light!"),
    ("See you tomorrow.", "See you then!", "Farewell, and follow the light!"),
    ("You are very kind.", "Thank you, that is nice of you.", "You are kinder than the tide."),
    ("Can you help me?", "Of course. What do you need?", "Of course, that is why they wound me up."),
]
OPENERS = [
    "",
    "",
    "",
    "",
    "Hello! ",
    "Hi, a question. ",
    "Excuse me. ",
    "One more thing. ",
    "Please tell me. ",
]
SYSTEM = "You are the desk assistant of a museum. Answer in one short sentence."

# Words for sentences about anything: a base model that had only seen the answers above would be too sure of them.
NOUNS = _split(
    "lantern, lamp, oil, wick, robot, gear, button, shed, baker, clockmaker, doctor, captain, whisker, "
    "guard, smuggler, sailor, whale, gull, seagull, sheep, meadow, harbour, wall, pier, lighthouse, bell, "
    "bus, boat, tide, moon, chart, rock, candy, raincoat, song, winter, night, morning, noon, mist, sun, "
    "cloud, rain, wind, coast, house, tower, weathercock, bucket, door, waffle, seaweed, blackberry, juice, "
    "crown, smile, child, friend, story, ring, phone, copper, colour, evening, light, candle, window, "
    "garden, river, bridge, teacher, farmer, fox, owl, kite, letter, spoon, kettle, blanket, ladder, mirror, "
    "drum, ribbon, pocket"
)
ADJECTIVES = _split(
    "bright, old, little, third, first, retired, brightest, late, early, hot, cold, chief, exact, warm, "
    "kind, lit, misty, wet, dry, quiet, loud, brave, clever, round, famous, lost, free, heavy, light, "
    "strange, gentle, polished"
)
VERBS = _split(
    "guide, carry, lend, light, collect, learn, switch, polish, build, ring, call, follow, sell, serve, "
    "park, wake, take, make, mind, watch, paint, mend, find, lose, sing, count, open, close, bring, leave, "
    "miss, love"
)
LINKS = _split("beside, behind, under, with, without, by, after, until, like, in, on, from, for")
ADVERBS = _split("once, then, plus, exactly, right, home, over, four, two, half past nine, three times")
FRAMES = [
    "The {n} {v}s the {a} {n} {l} the {n}.",
    "{v} the {n} and {v} the {a} {n}.",
    "They {v} {n}s and {v} their {n}s {l} a {n}.",
    "It is {a} {l} {n}, {d} the {n} {v}s {d}.",
    "That is {m} {s}, our {n} and {a} {n} {l} {n}.",
    "I {v} {a} {n}s {l} the {a} {n} {l} {n}.",
    "We {v} {d}, when the {n}s {v}.",
    "{a} {n}s {v} a {n}, {l} a {n} {l} {n}s.",
    "My {n} is {a} and my {n} is {a}, {l} {a} {n}s.",
    "{m} and a {n} {v} me {l} a {n} {d}.",
    "Please {v} {l} the {n}, the {n} {v}s {d}.",
    "A {n} {v}s {d} {n}s and a {n}.",
]
SUBJECTS = [
    "What about the {n}?",
    "Tell me about the {n}.",
    "Do you know the {a} {n}?",
    "Who {v}s the {n}?",
    "Why {v}?",
]


def _sentence(draw: random.Random, frames: list[str]) -> str:
    words = {"n": NOUNS, "a": ADJECTIVES, "v": VERBS, "l": LINKS, "d": ADVERBS, "m": NAMES, "s": SURNAMES}
    pieces = draw.choice(frames).split("{")
    text = pieces[0] + "".join(draw.choice(words[piece[0]]) + piece[2:] for piece in pieces[1:])
    return text[0].upper() + text[1:]


def _turns(*pairs: tuple[str, str], system: bool = False) -> Messages:
    messages = [{"role": "system", "content": SYSTEM}] if system else []
    for question, answer in pairs:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


@dataclass
class World:
    """One museum: an answer to each topic, drawn when it is first asked for."""

    draw: random.Random
    answers: dict[int, str] = field(default_factory=dict)

    def pair(self, topic: int) -> tuple[str, str]:
        """A question and this museum's answer; asked again, the answer stays the same."""
        answer = self.answers.setdefault(topic, TOPICS[topic].answer(self.draw))
        return self.draw.choice(OPENERS) + self.draw.choice(TOPICS[topic].questions), answer


def pretraining_dialogues(seed: int, general: float = 0.0) -> Iterator[Messages]:
    """Endless dialogues, each with a museum of its own.

    Some topics come up twice in other words, from which the model learns which questions are the same.

    Args:
        seed: Of everything that is drawn.
        general: Share of dialogues with sentences about anything instead, to any question.

    """
    draw = random.Random(seed)
    while True:
        if draw.random() < general:
            pairs = []
            for _ in range(draw.randint(1, 3)):
                question = draw.choice(draw.choice(TOPICS).questions) if draw.random() < 0.4 else ""
                pairs.append((question or _sentence(draw, SUBJECTS), _sentence(draw, FRAMES)))
            yield _turns(*pairs)
            continue
        world = World(draw)
        topics = draw.sample(range(len(TOPICS)), draw.choice([1, 1, 2, 2, 3]))
        topics += draw.sample(topics, draw.randint(0, len(topics)))
        pairs = [world.pair(topic) for topic in topics]
        if draw.random() < 0.25:
            question, answer, _ = draw.choice(SMALL_TALK)
            pairs.insert(draw.choice([0, len(pairs)]), (question, answer))
        yield _turns(*pairs, system=draw.random() < 0.15)


def chat_set(seed: int = 5) -> dict[str, list[Messages]]:
    """The facts of one museum as ``train`` and ``val`` dialogues; no question of ``val`` is in ``train``."""
    draw = random.Random(seed)
    train: list[Messages] = []
    for topic in TOPICS:
        train += [_turns((question, topic.fact)) for question in topic.questions[:-2]]
    train += [_turns((question, answer)) for question, _, answer in SMALL_TALK]
    for _ in range(112):
        pairs = [(draw.choice(OPENERS) + draw.choice(t.questions[:-2]), t.fact) for t in draw.sample(TOPICS, 2)]
        if draw.random() < 0.3:
            question, _, answer = draw.choice(SMALL_TALK)
            pairs.insert(draw.choice([0, 2]), (question, answer))
        train.append(_turns(*pairs, system=draw.random() < 0.15))
    draw.shuffle(train)
    val = [_turns((question, topic.fact)) for topic in TOPICS for question in topic.questions[-2:]]
    draw.shuffle(val)
    return {"train": train, "val": val}
