"""What Phalanx is compared with: a plain FastAPI app with the model in its process; `uvicorn tests.bench.plain:app`."""

from __future__ import annotations

from typing import Any

import torch
from fastapi import FastAPI
from pydantic import BaseModel

from tests.models import Heavy

torch.set_num_threads(1)
app = FastAPI()
model = Heavy(torch.device("cpu"))


class Batch(BaseModel):
    inputs: list[list[float]]


@app.post("/infer")
async def infer(batch: Batch) -> dict[str, Any]:
    with torch.inference_mode():
        return {"outputs": model.predict(torch.tensor(batch.inputs)).tolist()}


@app.post("/echo")
async def echo(body: dict[str, Any]) -> dict[str, Any]:
    return {"id": "1", "outputs": body["inputs"]}
