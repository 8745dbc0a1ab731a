"""Alembic's entry point: runs the revisions in the transaction of the store that is being opened."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
