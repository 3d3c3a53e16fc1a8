//! A worker with the token that sends every kind of message at the wrong time, truncated, repeatedly, and with numbers
//! at the limits of their types. Each such worker is expelled, the coordinator keeps its memory bounded and prints no
//! terminal control characters, and the run ends with the bytes of one process.

use crate::every_message::{at_the_edges, from_worker};
use crate::fleet::{Fleet, RUN};
use crate::hostile::Enemy;
use finetune::cluster::link::encode;
use finetune::cluster::message::ToCoordinator;
use std::collections::BTreeMap;

/// One in this many of the messages with a number at a limit is sent.
const STRIDE: usize = 7;
/// Upper bound on the growth of the coordinator's memory.
const ROOM: u64 = 100 << 20;

/// The state of a worker before it sends the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Nothing,
    Greeted,
    Leased,
}

struct Case {
    stage: Stage,
    what: String,
    frames: Vec<Vec<u8>>,
}

/// Whether a worker may end the run by this message: a bad value in its lease.
fn is_a_halt(message: &ToCoordinator) -> bool {
    matches!(message, ToCoordinator::Fault { .. })
}

fn cases() -> Vec<Case> {
    let (mut cases, mut edges) = (Vec::new(), 0);
    for message in from_worker() {
        let frame = encode(&message).unwrap().whole().to_vec();
        for stage in [Stage::Nothing, Stage::Greeted, Stage::Leased] {
            let mut case =
                |what: &str, frames| cases.push(Case { stage, what: format!("{what} {message:?}"), frames });
            case("said", vec![frame.clone()]);
            match stage {
                Stage::Nothing => case("cut short", vec![frame[..frame.len() / 2].to_vec()]),
                Stage::Greeted => case("said again and again", vec![frame.clone(); 50]),
                Stage::Leased => case("too long", vec![[&frame[..], &[0]].concat()]),
            }
            if stage != Stage::Nothing && !is_a_halt(&message) {
                for bytes in at_the_edges(&message) {
                    edges += 1;
                    if edges % STRIDE == 0 {
                        case("at an edge", vec![bytes.to_vec()]);
                    }
                }
            }
        }
    }
    cases
}

#[test]
fn every_message_at_the_wrong_time_changes_no_byte() {
    let run = format!("{RUN} --max-steps 4");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --expect-workers 1"));
    fleet.wait_until_listening();
    let (mut counts, before) = (BTreeMap::new(), fleet.resident("coordinator"));
    for case in cases() {
        let mut enemy = Enemy::new(fleet.at());
        match case.stage {
            Stage::Nothing => {}
            Stage::Greeted => enemy.greets(),
            Stage::Leased => drop(enemy.leased()),
        }
        let taken = case.frames.into_iter().all(|frame| enemy.send(frame));
        // Whatever the reaction was: these bytes are no message, and end the connection.
        let _ = taken && enemy.send(vec![0xff; 9]);
        enemy.last_word();
        let ended = fleet.ended("coordinator");
        assert!(ended.is_none(), "{:?} {}: the run ended {ended:?}\n{}", case.stage, case.what, fleet.all());
        *counts.entry(case.stage).or_insert(0) += 1;
    }
    let grown = fleet.resident("coordinator").saturating_sub(before);
    assert!(grown < ROOM, "{grown} bytes more");
    println!("{counts:?}, {} KiB more", grown >> 10);
    fleet.worker("honest", "--threads 1");
    fleet.all_end(&["coordinator", "honest"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    let said = fleet.said("coordinator");
    let obeyed = said.chars().find(|c| c.is_control() && !matches!(c, '\n' | '\t'));
    assert_eq!(obeyed, None, "a worker's text moves the terminal\n{said}");
    for part in ["internal error", "panicked", "\nerror:"] {
        assert!(!said.contains(part), "{part:?}\n{said}");
    }
}
