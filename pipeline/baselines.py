"""What a reward model must beat on the same pairs: length alone, and a bag of words.

Each gives 1 per test pair whose chosen answer it prefers, 0 where it prefers the other, 0.5 where it cannot tell; [B].
"""

import numpy as np
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from pipeline.data.records import Pair


def rivals(train: list[Pair], test: list[Pair]) -> dict[str, np.ndarray]:
    """Both, fitted on the pairs that the reward model was trained on."""
    return {"length_alone": length_alone(train, test), "bag_of_words": bag_of_words(train, test)}


def length_alone(train: list[Pair], test: list[Pair]) -> np.ndarray:
    """ "The longer is better" or its opposite, whichever fits the training pairs."""
    longer_B = _longer(test)
    return longer_B if _longer(train).mean() >= 0.5 else 1 - longer_B


def bag_of_words(train: list[Pair], test: list[Pair]) -> np.ndarray:
    """A logistic regression on word-count differences (chosen less rejected)."""
    words = CountVectorizer(token_pattern=r"\w+|[^\w\s]", min_df=2)  # nosec B106  # tokens of text
    try:
        words.fit([answer for pair in train for answer in (pair.chosen, pair.rejected)])
    except ValueError:  # no word is in two answers: nothing can be learnt from words
        return np.full(len(test), 0.5)
    differences = _differences(words, train)
    model = LogisticRegression(C=0.1, fit_intercept=False, max_iter=1000)
    model.fit(np.vstack([differences, -differences]), [1] * len(train) + [0] * len(train))
    return _preferred(model.decision_function(_differences(words, test)))


def _longer(pairs: list[Pair]) -> np.ndarray:
    return _preferred(np.array([len(pair.chosen) - len(pair.rejected) for pair in pairs]))


def _preferred(gaps_B: np.ndarray) -> np.ndarray:
    return (gaps_B > 0) + 0.5 * (gaps_B == 0)


def _differences(words: CountVectorizer, pairs: list[Pair]) -> np.ndarray:
    chosen = words.transform([pair.chosen for pair in pairs])
    rejected = words.transform([pair.rejected for pair in pairs])
    return np.asarray((chosen - rejected).todense(), dtype=float)
