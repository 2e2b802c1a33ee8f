"""Messages to people when a run has ended (`notify`): when one is due, what it says, how it is sent."""
