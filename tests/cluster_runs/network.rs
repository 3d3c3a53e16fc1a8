//! Four hosts of a network that is bad in one way or another: the run ends with the same bytes.

use crate::fleet::{Fleet, RUN};
use crate::hosts::{Hosts, Path};
use std::time::Duration;

const GIGABIT: Path = Path { megabits: 1000.0, delay: Duration::ZERO, loss: 0.0 };

/// A coordinator on host 1, workers on 2 to 4, while `trouble` happens after the second step.
fn check(run: &str, path: Path, trouble: impl FnOnce(&Hosts)) {
    let Some(mut fleet) = Fleet::on_hosts(4, path) else { return };
    let alone = fleet.alone(run);
    fleet.coordinator(&format!("{run} --expect-workers 3"));
    for name in ["two", "three", "four"] {
        fleet.faulty(name, "--threads 1", "slow=2");
    }
    fleet.wait_for_step(2);
    trouble(fleet.hosts());
    fleet.all_end(&["coordinator"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
}

#[test]
fn a_network_that_loses_one_frame_in_a_hundred_changes_no_byte() {
    check(&format!("{RUN} --max-steps 6"), Path { loss: 0.01, ..GIGABIT }, |_| {});
}

#[test]
fn forty_milliseconds_of_distance_change_no_byte() {
    let wan = Path { megabits: 91.0, delay: Duration::from_millis(20), loss: 0.0 };
    check(&format!("{RUN} --max-steps 6"), wan, |_| {});
}

#[test]
fn a_host_that_is_unplugged_changes_no_byte() {
    check(&format!("{RUN} --max-steps 6"), GIGABIT, |hosts| {
        hosts.unplug(4);
        std::thread::sleep(Duration::from_secs(2));
        hosts.heal(); // too short to be missed
        hosts.unplug(3);
    });
}

/// Nothing says that the way back is gone: only silence does.
#[test]
fn a_silent_drop_in_one_direction_changes_no_byte() {
    check(&format!("{RUN} --max-steps 6"), GIGABIT, |hosts| {
        hosts.drop_silently(1, 2);
        hosts.drop_silently(3, 1);
    });
}
