"""Takes step 0002."""

from alembic import op

from activities.ledger.migrations import statements

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Takes the step."""
    for statement in statements(revision):
        op.get_bind().exec_driver_sql(statement)
