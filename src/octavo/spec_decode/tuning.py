"""Constants that tune speculation. None of them changes an output, only how long it takes.

Measurements are of the simulated loads of tests/spec_decode/test_never_slower.py.
"""

from __future__ import annotations

# How much to draft

LONGEST_DRAFT = 16  # tokens, where the length is chosen
LEAST_GAIN = 1.06  # times the tokens per second without drafts: less is within the estimates' error

# Acceptance (all counts are of draft tokens verified)

FIRST_GUESS = 0.5  # before anything was seen of a draft …
FIRST_GUESS_ALTERNATIVE = 0.25  # … and of an alternative where the draft is wrong
ACCEPTANCE_PRIOR_WEIGHT = 2.0  # what the first guess at a position counts for
ACCEPTANCE_MEMORY = 256.0  # for the mean of a position, so that it follows a change of topic
SEQUENCE_WEIGHT = 8.0  # what a sequence's being like the others counts for, beside its own
SEQUENCE_MEMORY = 32.0  # of a sequence
HIGHEST_ACCEPTANCE = 0.98  # nothing is certain, however often it was right
NEGLIGIBLE_GAIN = 0.05  # probability of becoming output below which no row costs so little

# Times of steps and of drafting

KNEE = 8.0  # tokens whose arithmetic takes as long as reading the weights, before it is learned
SPEED_GAIN = 0.2  # how far a step moves the machine's speed, which changes within a second
CORRECTION_GAIN = 0.1  # how far it moves a size's correction, at least
MAX_ERROR = 0.5  # logarithm; a step that is farther off is something else's doing
STEPS_REMEMBERED = 150  # over which observations of a size fade
FAINT = 0.5  # observations below which a size is as good as never seen
REFRESH_STEPS = 32  # between updates of the table of sizes, which take some 20 µs
EXPLORATION = 0.1  # share by which a size never seen seems quicker; without it many rows are
# never tried where 32 sequences would gain by 15 %
NEARBY = 1.25  # times as large or small: such sizes need not be tried as well
DRAFTING_GAIN = 0.05  # how far drafting moves what is known of its time, at least

# The account

ACCOUNT_STEPS = 256  # over which it fades
MAX_LOSS = 0.005  # share of the time; then speculation rests until so much has passed
MAX_CREDIT = 0.01  # share of the time that earlier gains count for: with 0 one wrong draft of eight
# tokens stops drafts that triple the speed, and a quarter of what there is to gain is lost
CREDIT_STEPS = 128  # that it begins with, so that something can be tried

# Steps without drafts

STEPS_COMPARED = 3.0  # to be seen lately, for those with drafts to be compared to: with 4 the
# steps without drafts cost a fifth of what there is to gain, with 2 a machine that changes is
# found out later
REST_STEPS = 16  # most in a row in which no drafter is asked
IDLE_SHARE = 0.01  # of the time, for drafters that bring nothing
TRIAL_TOKENS = 3  # drafted now and then by a model that does not seem to pay

# Reading texts

LOOKUP_TOKENS_PER_STEP = 4096  # given to a `Drafter`: some milliseconds
NEW_TEXT_TOKENS = 64  # more at once are a new text, whose reading is charged over its answer
ANSWERS_REMEMBERED = 32  # for their mean length

# Models that draft

DRAFT_MODEL_FEW_TOKENS = 32  # not seen yet, with which a sequence takes part at once
DRAFT_MODEL_READING_TOKENS = 128  # a step, of texts that are read from their beginning
DRAFT_MODEL_IDLE_STEPS = 64  # without drafting, after which a text gives way to another
HEADS_LEAST_CHANCE = 0.15  # that a whole draft is right, for heads to go on with it
