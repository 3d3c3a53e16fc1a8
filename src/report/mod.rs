//! What people see of a run: pure functions of its events. Nothing imports this but `cli`.
