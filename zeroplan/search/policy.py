"""How a search spends its time and what it calls equal: choices, each with its reason. No predicted byte or second has one.

What was measured says by what. The others are judgements: with other values a search answers the same later, or with more
simulations.
Bounds of what is enumerated (degrees, nodes, micro batches) stand where it is enumerated.
"""

from __future__ import annotations

from zeroplan.core.sizes import GIB

# --- what an answer shows ---------------------------------------------------------------------------------------------------
#: Families (stage, offloads, checkpointing, what is compiled) that an answer shows: what one screen holds.
SHOWN = 5
#: Changes that an answer without a fitting configuration names: a line each.
NAMED = 6
#: Memory that a "what if" adds to each card: a tenth of an 80 GiB card.
MORE_VRAM = 8 * GIB

# --- what is equal ----------------------------------------------------------------------------------------------------------
#: Of configurations whose predicted speeds differ by less, the simplest is named; predicted times are off by as much
#: (docs/recommend_measured.md).
EQUALLY_FAST = 0.03
#: Where the slowest host that was calibrated makes a step so much longer than a fast one, answers say so.
HOST_DECIDES = 1.1
#: What gains less is not offered.
NOTABLE = 1.02
#: Speeds that differ by less are shown as equal: tables print three digits.
EQUAL = 0.001

# --- what is simulated ------------------------------------------------------------------------------------------------------
#: Simulations that an answer may take: about two seconds' worth for a model of 32 blocks.
MOST_SIMULATIONS = 48
#: Simulations that one "what if" may take, and the nearest miss and each change: the best by its floor, and one in its place.
WHAT_IF = TRIES = 2
#: A floor below this share of the card: likely to fit as it is, so the smallest variant is not asked first. A judgement: it
#: orders simulations and leaves none out.
LIKELY = 0.8
#: What no setting changes is allocated memory, but for buckets: where that alone exceeds the card by so much, none fits. A
#: judgement: more than the buckets' share that another bucket size can save.
REACH = 1.05
#: Where the lightest floor is this many times what there is, one simulation says enough. A judgement: nothing near it fits.
FAR = 1.5

#: Tokens of a step that a layout takes at most where the request does not say the batch: what the largest step of the published
#: runs has (DeepSeek-V3, arXiv 2412.19437, section 4.2: 15,360 sequences of 4,096 tokens). Speed alone would take ever more.
MOST_TOKENS = 15_360 * 4_096

# --- what stands for a plan before it is simulated ----------------------------------------------------------------------------
#: Formulas of states that the schedule frees for a moment, and pads, may be off by this much; a floor that is too high would
#: leave out what fits (tests/search hold floors against plans).
FLOOR_SLACK = 0.98
#: Without a tape, how far the analytic estimate of activations may be from the truth, either way, when a search asks what may
#: fit. A judgement, narrower than what traced runs show (planner/formula.py, SPREAD): a plan without a tape says so.
ANALYTIC_SPREAD = 0.25

# --- what is run --------------------------------------------------------------------------------------------------------------
#: What is expected to take longer than this many times the best measured is not run: predictions of one bound are off alike.
HOPE = 1.25
