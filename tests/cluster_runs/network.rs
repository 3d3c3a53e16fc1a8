//! Four hosts of a network with one kind of fault each: the run ends with the same bytes.

use crate::fleet::{Fleet, RUN};
use crate::hosts::{Hosts, Path};
use crate::tap::within;
use std::io;
use std::net::UdpSocket;
use std::time::{Duration, Instant};

const GIGABIT: Path = Path { megabits: 1000.0, delay: Duration::ZERO, loss: 0.0 };

/// A coordinator on host 1, workers on 2 to 4, and `trouble` after the second step, from which the run continues
/// without one of `struck`. `slow` sets the length of the six steps: with 20 they take over a second, so that each
/// worker holds a lease when the trouble begins.
fn check(slow: u32, path: Path, struck: &[&str], trouble: impl FnOnce(&Hosts)) {
    let run = &format!("{RUN} --max-steps 6");
    let Some(mut fleet) = Fleet::on_hosts(4, path) else { return };
    let alone = fleet.alone(run);
    fleet.coordinator(&format!("{run} --expect-workers 3"));
    for name in ["two", "three", "four"] {
        fleet.faulty(name, "--threads 1", &format!("slow={slow}"));
    }
    fleet.wait_for_step(2);
    let step = fleet.steps();
    trouble(fleet.hosts());
    fleet.all_end(&["coordinator"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    if !struck.is_empty() {
        fleet.assert_excluded(struck, step);
    }
}

#[test]
fn one_percent_frame_loss_changes_no_byte() {
    check(20, Path { loss: 0.01, ..GIGABIT }, &[], |_| {});
}

#[test]
fn forty_milliseconds_of_latency_change_no_byte() {
    let wan = Path { megabits: 91.0, delay: Duration::from_millis(20), loss: 0.0 };
    check(20, wan, &[], |_| {});
}

#[test]
fn unplugged_host_changes_no_byte() {
    check(150, GIGABIT, &["three", "four"], |hosts| {
        hosts.unplug(4);
        std::thread::sleep(Duration::from_secs(2));
        hosts.heal(); // too short for a timeout
        hosts.unplug(3);
    });
}

/// No error reports the lost direction: only silence shows it.
#[test]
fn a_silent_drop_in_one_direction_changes_no_byte() {
    check(40, GIGABIT, &["two", "three"], |hosts| {
        hosts.drop_silently(1, 2);
        hosts.drop_silently(3, 1);
    });
}

/// A coordinator on host 1, the seats of a line on 2 and 3, a spare worker on 4, and `trouble` after the second step.
fn check_line(path: Path, fell: bool, trouble: impl FnOnce(&Hosts)) {
    let run = &format!("{RUN} --max-steps 6");
    let Some(mut fleet) = Fleet::on_hosts(4, path) else { return };
    let alone = fleet.alone(run);
    fleet.coordinator(&format!("{run} --stages 2"));
    for name in ["two", "three"] {
        fleet.faulty(name, "--threads 1", "slow=20");
    }
    fleet.wait_for_step(1);
    fleet.worker("spare", "--threads 1");
    fleet.wait_for_step(2);
    trouble(fleet.hosts());
    fleet.all_end(&["coordinator"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    let said = fleet.said("coordinator");
    assert_eq!(said.matches("joined").count() > 1, fell, "{}", fleet.all());
}

#[test]
fn a_line_over_a_slow_network_changes_no_byte() {
    let wan = Path { megabits: 91.0, delay: Duration::from_millis(20), loss: 0.0 };
    check_line(wan, false, |_| {});
    check_line(Path { loss: 0.01, ..GIGABIT }, false, |_| {});
}

/// The seat behind a slow link is at an end of the line, where half as much goes over its link as in the middle.
#[test]
fn a_slow_link_changes_the_order_of_seats_and_no_byte() {
    let run = &format!("{RUN} --max-steps 3");
    let far = Path { delay: Duration::from_millis(300), ..GIGABIT };
    let Some(mut fleet) = Fleet::on_unlike_hosts(&[GIGABIT, GIGABIT, far, GIGABIT]) else { return };
    let alone = fleet.alone(run);
    fleet.coordinator(&format!("{run} --stages 3"));
    for name in ["two", "three", "four"] {
        fleet.worker(name, "--threads 1");
        fleet.wait_for(name, "waits for its place");
    }
    fleet.all_end(&["coordinator"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    // In the order of their connection the second one would be in the middle.
    let slow = ["two", "three", "four"].map(|name| {
        let said = fleet.said(name);
        let held = said.lines().find(|line| line.starts_with("holds ")).unwrap_or_else(|| panic!("{said}"));
        held.split(' ').find_map(|word| word.parse::<usize>().ok()).unwrap()
    });
    assert!(slow[1] == 0 || slow[1] > slow[0].max(slow[2]), "first layers of two, three, four: {slow:?}");
}

/// The parameters of the last step are still on their way when the run is over.
#[test]
fn workers_behind_a_slow_link_hear_the_end() {
    let slow = Path { megabits: 20.0, delay: Duration::from_millis(20), loss: 0.0 };
    let run = &format!("{} --max-steps 2", RUN.replace("--rank 4", "--rank 256"));
    for how in ["--expect-workers 2", "--stages 2"] {
        let Some(mut fleet) = Fleet::on_hosts(3, slow) else { return };
        let alone = fleet.alone(run);
        fleet.coordinator(&format!("{run} {how}"));
        fleet.worker("two", "--threads 1");
        fleet.worker("three", "--threads 1");
        fleet.all_end(&["coordinator", "two", "three"], 0);
        assert!(fleet.adapter("out") == alone, "{}", fleet.all());
        for name in ["two", "three"] {
            assert!(!fleet.said(name).contains("lost"), "{}", fleet.all());
        }
    }
}

/// Both seats still reach the coordinator; only the silence between them shows the lost direction.
#[test]
fn a_silent_drop_between_two_seats_changes_no_byte() {
    check_line(GIGABIT, true, |hosts| hosts.drop_silently(2, 3));
}

#[test]
fn an_unplugged_seat_changes_no_byte() {
    check_line(GIGABIT, true, |hosts| hosts.unplug(3));
}

/// The switch forwards multicast to all hosts: a worker on another host needs no address.
#[test]
fn a_worker_finds_the_coordinator_of_another_host() {
    let Some(mut fleet) = Fleet::on_hosts(2, GIGABIT) else { return };
    let run = format!("{RUN} --max-steps 3");
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --expect-workers 1"));
    fleet.seeker("seeker", "auto", "60s");
    fleet.all_end(&["coordinator", "seeker"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
}

/// The first packet already gets no answer and no error: a firewall that drops packets.
#[test]
fn worker_whose_packets_are_dropped_gives_advice() {
    let Some(mut fleet) = Fleet::on_hosts(2, GIGABIT) else { return };
    fleet.hosts().drop_silently(1, 2);
    fleet.coordinator(&format!("{RUN} --max-steps 3 --expect-workers 1"));
    fleet.seeker("cut", &format!("{}:9000", Hosts::address(1)), "6s");
    assert_ne!(fleet.end("cut"), Some(0), "{}", fleet.all());
    let said = fleet.said("cut");
    assert!(said.contains("does not answer: a firewall drops it"), "{said}");
    assert!(said.contains("--role worker --bind"), "{said}");
}

/// Host 2 echoes messages; host 1 sends `count` of them and returns how long each echo took.
fn echoes(hosts: &Hosts, count: u32) -> Vec<Duration> {
    let there = Hosts::address(2);
    let at = format!("{there}:7");
    let echo = within(&hosts.namespace(2), move || {
        let socket = UdpSocket::bind((there.as_str(), 7))?;
        socket.set_read_timeout(Some(Duration::from_secs(1)))?;
        let mut buffer = [0; 64];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            socket.send_to(&buffer[..length], from)?;
        }
        Ok(())
    });
    let asked = within(&hosts.namespace(1), move || {
        let socket = UdpSocket::bind("10.77.0.1:0")?;
        socket.set_read_timeout(Some(Duration::from_millis(150)))?;
        let (mut answers, mut buffer) = (Vec::new(), [0; 64]);
        for number in 0..count {
            let began = Instant::now();
            socket.send_to(&number.to_le_bytes(), &at)?;
            while let Ok(length) = socket.recv(&mut buffer) {
                if buffer[..length] == number.to_le_bytes() {
                    answers.push(began.elapsed());
                    break;
                }
            }
        }
        io::Result::Ok(answers)
    });
    let answers = asked.join().unwrap().unwrap();
    echo.join().unwrap().unwrap();
    answers
}

/// The simulated network has the stated rate, delay, loss and cuts.
#[test]
fn simulated_switch_delays_drops_and_disconnects() {
    let far = Path { megabits: 91.0, delay: Duration::from_millis(20), loss: 0.0 };
    let Some(hosts) = Hosts::new(2, far) else { return };
    let answers = echoes(&hosts, 5);
    assert!(answers.len() >= 4 && answers.iter().all(|a| a.as_millis() >= 40), "{answers:?}");
    hosts.drop_silently(2, 1);
    assert!(echoes(&hosts, 3).is_empty());
    hosts.heal();
    assert!(!echoes(&hosts, 3).is_empty());
    let lossy = Hosts::new(2, Path { loss: 0.3, ..GIGABIT }).unwrap();
    let heard = echoes(&lossy, 60).len();
    assert!((10..50).contains(&heard), "{heard} of 60 at 30 % loss, both ways");
}
