"""stub"""


def meteor(responses, references):
    return [0.0] * len(responses)


def rouge(responses, references, kind="rougeL"):
    return [0.0] * len(responses)


def sentence_bleu(responses, references):
    return [0.0] * len(responses)
