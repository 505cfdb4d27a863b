"""The calls of `api.py` as HTTP routes below `/lib-merge/v1`, for hosts that were started with their own API."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from fastapi import Depends, HTTPException
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBasic, HTTPBasicCredentials
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from ..host import Host
from . import api

PREFIX = "/lib-merge/v1"
_LARGEST_BODY = 1 << 22


def add_routes(app: Any, host: Host, users: Mapping[str, str]) -> None:
    """Add the routes to a FastAPI app.

    Args:
        app: the host's.
        host: where models come from and results go to.
        users: name -> password that calls must bring by HTTP Basic; empty where the host asks for none.
    """
    guards = [Depends(_guard(users))] if users else []

    def add(method: str, path: str, endpoint: Callable[[Request], Awaitable[Any]]) -> None:
        app.add_api_route(f"{PREFIX}/{path}", endpoint, methods=[method], dependencies=guards, include_in_schema=False)

    for name in api.CALLS:
        add("POST", name, _run_call(partial(api.submit, host, name)))
    add("POST", "plan", _run_call(partial(api.plan, host)))
    add("GET", "jobs", _call(lambda id: api.jobs(host)))
    add("GET", "jobs/{id}", _call(partial(api.job, host)))
    add("POST", "jobs/{id}/stop", _call(partial(api.stop, host)))
    add("GET", "models/{id}", _call(partial(api.models, host)))


def _guard(users: Mapping[str, str]) -> Callable[..., None]:
    def guard(credentials: HTTPBasicCredentials = Depends(HTTPBasic())) -> None:  # noqa: B008 - FastAPI's way
        password = users.get(credentials.username, "")
        right = secrets.compare_digest(credentials.password.encode(), password.encode())
        if not right or credentials.username not in users:
            raise HTTPException(401, "wrong name or password", {"WWW-Authenticate": "Basic"})

    return guard


def _call(function: Callable[[str], api.Answer]) -> Callable[[Request], Awaitable[Any]]:
    """An endpoint whose only value stands in the path."""

    async def endpoint(request: Request) -> Any:
        answer = await run_in_threadpool(api.answered, function, request.path_params.get("id", ""))
        return JSONResponse(answer, 404 if "error" in answer and "job" not in answer else 200)

    return endpoint


def _run_call(function: Callable[..., api.Answer]) -> Callable[[Request], Awaitable[Any]]:
    """An endpoint that takes a JSON object with a recipe."""

    async def endpoint(request: Request) -> Any:
        # a page of another site can send texts without being asked, JSON it cannot
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return JSONResponse({"error": "send application/json"}, 415)
        body = await request.body()
        if len(body) > _LARGEST_BODY:
            return JSONResponse({"error": "the body is too large"}, 413)
        answer = await run_in_threadpool(api.answered, lambda: function(*api.texts(body)))
        return JSONResponse(answer, 400 if "error" in answer and "job" not in answer else 200)

    return endpoint
