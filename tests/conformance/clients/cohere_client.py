"""The cohere package against a server: rerank in both of its versions. Arguments: URL/v1 and model."""

import importlib.metadata
import sys

import cohere
from cohere.errors import BadRequestError, NotFoundError

URL, MODEL = sys.argv[1].removesuffix("/v1"), sys.argv[2]
DOCUMENTS = ["The mill stands at the river.", "Bread is made of flour.", "Water turns the wheel."]
ASK = {"model": MODEL, "query": "What turns the wheel?", "documents": DOCUMENTS}
new, old = cohere.ClientV2("x", base_url=URL), cohere.Client("x", base_url=URL)

for client in (new, old):
    results = client.rerank(**ASK).results
    scores = [r.relevance_score for r in results]
    assert sorted(r.index for r in results) == [0, 1, 2] and scores == sorted(scores, reverse=True)
    best = client.rerank(top_n=1, **ASK).results
    assert [(r.index, r.relevance_score) for r in best] == [(results[0].index, results[0].relevance_score)]
for kind, fields in ((NotFoundError, {"model": "other"}), (BadRequestError, {"documents": []})):
    try:
        new.rerank(**{**ASK, **fields})
    except kind as e:
        assert e.body
    else:
        raise AssertionError(fields)
print(f"cohere {importlib.metadata.version('cohere')}: 4 checks")
