//! How long a worker continues to search for a run.

use super::script::{blueprint, equipment};
use finetune::cluster::link::{MemberLink, connected};
use finetune::cluster::message::{Bye, ToCoordinator, ToWorker};
use finetune::cluster::worker::{Ending, ModelSource, Reconnect, Way, Worker};
use finetune::net::{Listener, Party, Security};
use finetune::train::stop::Stop;
use std::time::{Duration, Instant};

#[test]
fn worker_deferred_every_time_gives_up_in_time() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let port = "127.0.0.1:0".parse().unwrap();
    let bind = Listener::bind(&port, Security::plain(Party::Coordinator), |_| ());
    let mut listener = runtime.block_on(bind).unwrap();
    let at = listener.address().to_string().parse().unwrap();
    let handle = runtime.handle().clone();
    let refusing = runtime.spawn(async move {
        let mut count = 0;
        while let Ok(connection) = listener.accept().await {
            let mut link: MemberLink = connected(&handle, connection, Duration::ZERO);
            assert!(matches!(link.from.recv().await, Some(ToCoordinator::Hello(_))));
            let bye = Bye::Later { reason: format!("not now ({count})") };
            link.to.send(ToWorker::Bye(bye)).await.unwrap();
            count += 1;
        }
    });
    let reconnect = Reconnect {
        way: Way::Dial(at),
        security: Security::plain(Party::Worker),
        patience: Duration::from_secs(1),
        stays: false,
        model: None,
        options: Vec::new(),
        stop: &Stop::new(),
        say: &|_| (),
    };
    let began = Instant::now();
    let ending = reconnect.run(&mut Worker::new(equipment(1, ""), ModelSource::Here(blueprint()), &|_| ()));
    assert!(matches!(&ending, Ending::Failed(line) if line.contains("not now")), "{ending:?}");
    assert!(began.elapsed() >= Duration::from_secs(1) && began.elapsed() < Duration::from_secs(8));
    refusing.abort();
}
