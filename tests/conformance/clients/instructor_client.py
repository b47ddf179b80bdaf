"""instructor against a server: typed answers through tools and through schemas, whole and partial. Arguments: URL/v1 and model."""

import importlib.metadata
import sys

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field

URL, MODEL = sys.argv[1:3]
ASK = {"model": MODEL, "temperature": 0, "max_tokens": 300, "messages": [{"role": "user", "content": "Tell me of Paris."}]}
done = []


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    population: int = Field(ge=0, le=99999999)


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key="x", max_retries=0), mode=mode)
    whole = client.chat.completions.create(response_model=City, max_retries=1, **ASK)
    assert isinstance(whole, City)
    *_, last = client.chat.completions.create_partial(response_model=City, max_retries=1, **ASK)
    assert isinstance(City.model_validate(last.model_dump()), City)  # (its prompt differs: so may the answer)
    done.append(mode.name)
print(f"instructor {importlib.metadata.version('instructor')}: {', '.join(done)}, whole and partial")
