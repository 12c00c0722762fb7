"""What a reward model must beat on the same pairs: length alone, and a bag of words."""

import numpy as np
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from pipeline.data.records import Pair


def length_accuracy(train: list[Pair], test: list[Pair]) -> float:
    """Accuracy of "the longer is better" or its opposite, whichever fits the training pairs; ties count one half."""
    sign = 1 if _longer_share(train) >= 0.5 else -1
    return _longer_share(test) if sign == 1 else 1 - _longer_share(test)


def bag_of_words_accuracy(train: list[Pair], test: list[Pair]) -> float:
    """Accuracy of a logistic regression on word-count differences (chosen less rejected); ties count one half."""
    words = CountVectorizer(token_pattern=r"\w+|[^\w\s]", min_df=2)
    try:
        words.fit([answer for pair in train for answer in (pair.chosen, pair.rejected)])
    except ValueError:  # no word is in two answers: nothing can be learnt from words
        return 0.5
    differences = _differences(words, train)
    model = LogisticRegression(C=0.1, fit_intercept=False, max_iter=1000)
    model.fit(np.vstack([differences, -differences]), [1] * len(train) + [0] * len(train))
    margins = model.decision_function(_differences(words, test))
    return float(np.mean((margins > 0) + 0.5 * (margins == 0)))


def _longer_share(pairs: list[Pair]) -> float:
    gaps = np.array([len(pair.chosen) - len(pair.rejected) for pair in pairs])
    return float(np.mean((gaps > 0) + 0.5 * (gaps == 0)))


def _differences(words: CountVectorizer, pairs: list[Pair]) -> np.ndarray:
    chosen = words.transform([pair.chosen for pair in pairs])
    rejected = words.transform([pair.rejected for pair in pairs])
    return np.asarray((chosen - rejected).todense(), dtype=float)
