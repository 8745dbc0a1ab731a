CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
CREATE TABLE trace (
	"key" INTEGER NOT NULL, 
	project VARCHAR NOT NULL, 
	id VARCHAR NOT NULL, 
	source VARCHAR NOT NULL, 
	source_id VARCHAR, 
	name VARCHAR, 
	session VARCHAR, 
	agent VARCHAR, 
	model VARCHAR, 
	episode_id VARCHAR, 
	stage VARCHAR, 
	n INTEGER, 
	task_id VARCHAR, 
	pool VARCHAR, 
	split VARCHAR, 
	purpose VARCHAR, 
	"group" VARCHAR, 
	policy_version INTEGER, 
	seed BIGINT, 
	episode_state VARCHAR, 
	stop_reason VARCHAR, 
	reward_state VARCHAR NOT NULL, 
	reward FLOAT, 
	failure VARCHAR, 
	n_steps INTEGER NOT NULL, 
	n_tool_calls INTEGER NOT NULL, 
	n_spans INTEGER NOT NULL, 
	n_errors INTEGER NOT NULL, 
	n_prompt_tokens BIGINT NOT NULL, 
	n_completion_tokens BIGINT NOT NULL, 
	cost_usd FLOAT, 
	answer VARCHAR, 
	error VARCHAR, 
	started_at DATETIME, 
	duration_s FLOAT NOT NULL, 
	stored_at DATETIME NOT NULL, 
	body BLOB, 
	bodies BLOB, superseded VARCHAR, 
	PRIMARY KEY ("key"), 
	UNIQUE (project, id)
);
CREATE INDEX trace_by_failure ON trace (project, failure, "key");
CREATE INDEX trace_by_session ON trace (project, session, "key");
CREATE UNIQUE INDEX trace_of_episode ON trace (project, episode_id) WHERE stage IS NOT NULL;
CREATE INDEX trace_by_episode ON trace (project, episode_id) WHERE episode_id IS NOT NULL;
CREATE INDEX trace_by_project ON trace (project, "key");
CREATE INDEX trace_by_source ON trace (source);
CREATE INDEX trace_by_age ON trace (stored_at);
CREATE INDEX ix_trace_policy_version ON trace (policy_version);
CREATE INDEX ix_trace_task_id ON trace (task_id);
CREATE TABLE span (
	trace_key BIGINT NOT NULL, 
	span_id VARCHAR NOT NULL, 
	parent_id VARCHAR, 
	name VARCHAR NOT NULL, 
	kind VARCHAR NOT NULL, 
	start_ns BIGINT NOT NULL, 
	end_ns BIGINT NOT NULL, 
	error VARCHAR, 
	session VARCHAR, 
	agent VARCHAR, 
	model VARCHAR, 
	tool VARCHAR, 
	n_prompt_tokens BIGINT NOT NULL, 
	n_completion_tokens BIGINT NOT NULL, 
	cost_usd FLOAT, 
	episode_id VARCHAR, 
	task_id VARCHAR, 
	policy_version INTEGER, 
	reward FLOAT, 
	response_id VARCHAR, 
	head BLOB NOT NULL, 
	bodies BLOB NOT NULL, 
	PRIMARY KEY (trace_key, span_id)
);
CREATE INDEX span_by_time ON span (trace_key, start_ns, span_id);
CREATE INDEX span_call_by_parent ON span (trace_key, parent_id) WHERE kind = 'chat';
CREATE INDEX span_by_response ON span (trace_key, response_id) WHERE response_id IS NOT NULL;
CREATE TABLE body (
	"key" INTEGER NOT NULL, 
	hash BLOB NOT NULL, 
	data BLOB NOT NULL, 
	PRIMARY KEY ("key"), 
	UNIQUE (hash)
);
CREATE TABLE trace_body (
	trace_key BIGINT NOT NULL, 
	body_key BIGINT NOT NULL, 
	PRIMARY KEY (trace_key, body_key)
)
 WITHOUT ROWID;
CREATE INDEX trace_body_by_body ON trace_body (body_key, trace_key);
CREATE TABLE facet (
	trace_key BIGINT NOT NULL, 
	name VARCHAR NOT NULL, 
	value VARCHAR NOT NULL, 
	PRIMARY KEY (trace_key, name, value)
)
 WITHOUT ROWID;
CREATE INDEX facet_by_value ON facet (name, value, trace_key);
CREATE TABLE score (
	trace_key BIGINT NOT NULL, 
	verifier VARCHAR NOT NULL, 
	source VARCHAR NOT NULL, 
	version VARCHAR NOT NULL, 
	value FLOAT, 
	error VARCHAR, 
	given_at DATETIME NOT NULL, 
	PRIMARY KEY (trace_key, verifier, source)
);
CREATE INDEX score_by_verifier ON score (verifier, value, trace_key);
CREATE TABLE label (
	trace_key BIGINT NOT NULL, 
	detector VARCHAR NOT NULL, 
	type VARCHAR NOT NULL, 
	step INTEGER NOT NULL, 
	evidence VARCHAR NOT NULL, 
	confidence FLOAT NOT NULL, 
	critical BOOLEAN NOT NULL, 
	given_at DATETIME NOT NULL, 
	PRIMARY KEY (trace_key, detector, type, step)
);
CREATE INDEX label_by_type ON label (type, trace_key);
CREATE TABLE verdict (
	"key" INTEGER NOT NULL, 
	trace_key BIGINT NOT NULL, 
	given_at DATETIME NOT NULL, 
	"by" VARCHAR NOT NULL, 
	why VARCHAR NOT NULL, 
	state VARCHAR NOT NULL, 
	reward FLOAT, 
	stamp VARCHAR, 
	body BLOB NOT NULL, 
	PRIMARY KEY ("key")
);
CREATE INDEX verdict_by_trace ON verdict (trace_key, "key");
CREATE TABLE agreement (
	project VARCHAR NOT NULL, 
	verifier VARCHAR NOT NULL, 
	version VARCHAR NOT NULL, 
	measured_at DATETIME NOT NULL, 
	body JSON NOT NULL, 
	PRIMARY KEY (project, verifier, version)
);
CREATE TABLE setting (
	name VARCHAR NOT NULL, 
	value BLOB NOT NULL, 
	PRIMARY KEY (name)
);
CREATE TABLE api_key (
	id VARCHAR NOT NULL, 
	sha256 VARCHAR NOT NULL, 
	project VARCHAR NOT NULL, 
	scopes VARCHAR NOT NULL, 
	made_at DATETIME NOT NULL, 
	max_calls BIGINT, 
	max_tokens BIGINT, 
	max_usd FLOAT, 
	n_calls BIGINT NOT NULL, 
	n_tokens BIGINT NOT NULL, 
	cost_usd FLOAT NOT NULL, max_calls_per_minute BIGINT, 
	PRIMARY KEY (id)
);
CREATE VIRTUAL TABLE body_text USING fts5(words, content='', tokenize='unicode61');
CREATE TABLE policy_version (
	project VARCHAR NOT NULL, 
	number INTEGER NOT NULL, 
	parent INTEGER, 
	kind VARCHAR NOT NULL, 
	artifact VARCHAR, 
	sha256 VARCHAR NOT NULL, 
	config_hash VARCHAR NOT NULL, 
	state VARCHAR NOT NULL, 
	note VARCHAR NOT NULL, 
	created_at DATETIME NOT NULL, parts JSON DEFAULT '{}' NOT NULL, unhashed JSON DEFAULT '[]' NOT NULL, lineage JSON, 
	PRIMARY KEY (project, number)
);
CREATE TABLE eval_report (
	project VARCHAR NOT NULL, 
	suite_hash VARCHAR NOT NULL, 
	policy_version INTEGER NOT NULL, 
	body JSON NOT NULL, 
	PRIMARY KEY (project, suite_hash, policy_version)
);
CREATE TABLE decision (
	project VARCHAR NOT NULL, 
	candidate INTEGER NOT NULL, 
	body JSON NOT NULL, 
	PRIMARY KEY (project, candidate)
);
CREATE TABLE stage (
	project VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	position INTEGER NOT NULL, 
	n_episodes INTEGER NOT NULL, 
	n_tool_calls INTEGER NOT NULL, 
	wall_s FLOAT NOT NULL, 
	cpu_s FLOAT NOT NULL, 
	dropped JSON NOT NULL, 
	metrics JSON NOT NULL, kind VARCHAR DEFAULT 'other' NOT NULL, version INTEGER, suite_hash VARCHAR, sandbox VARCHAR, 
	PRIMARY KEY (project, name)
);
CREATE INDEX trace_by_pool ON trace (project, pool, split, reward);
CREATE INDEX trace_by_stage ON trace (project, stage, n);
CREATE TABLE lease (
	project VARCHAR NOT NULL, 
	owner VARCHAR NOT NULL, 
	ends_at DATETIME NOT NULL, 
	PRIMARY KEY (project)
);
CREATE TABLE evidence (
	project VARCHAR NOT NULL, 
	id VARCHAR NOT NULL, 
	kind VARCHAR NOT NULL, 
	"key" VARCHAR NOT NULL, 
	number INTEGER NOT NULL, 
	about JSON NOT NULL, 
	verdict VARCHAR, 
	started_at DATETIME NOT NULL, result BLOB, 
	PRIMARY KEY (project, id)
);
CREATE UNIQUE INDEX evidence_by_key ON evidence (project, kind, "key", number);
CREATE TABLE outcome (
	"key" INTEGER NOT NULL, 
	project VARCHAR NOT NULL, 
	evidence VARCHAR NOT NULL, 
	position INTEGER, 
	suite VARCHAR NOT NULL, 
	suite_hash VARCHAR NOT NULL, 
	task_id VARCHAR NOT NULL, 
	side VARCHAR NOT NULL, 
	trial BIGINT NOT NULL, 
	policy_version INTEGER NOT NULL, 
	trace_id VARCHAR, 
	state VARCHAR NOT NULL, 
	reward FLOAT, 
	body VARCHAR NOT NULL, 
	PRIMARY KEY ("key")
);
CREATE UNIQUE INDEX outcome_by_evidence ON outcome (project, evidence, position);
CREATE INDEX outcome_by_task ON outcome (project, suite, task_id, policy_version);
CREATE TABLE look (
	project VARCHAR NOT NULL, 
	evidence VARCHAR NOT NULL, 
	suite VARCHAR NOT NULL, 
	number INTEGER NOT NULL, 
	n INTEGER NOT NULL, 
	e_fail FLOAT NOT NULL, 
	e_pass FLOAT NOT NULL, 
	mean FLOAT NOT NULL, 
	low FLOAT NOT NULL, 
	high FLOAT NOT NULL, 
	PRIMARY KEY (project, evidence, suite, number)
);
CREATE UNIQUE INDEX policy_live ON policy_version (project) WHERE state = 'live';
CREATE UNIQUE INDEX policy_canary ON policy_version (project) WHERE state = 'canary';
CREATE TABLE policy_move (
	"key" INTEGER NOT NULL, 
	project VARCHAR NOT NULL, 
	version INTEGER NOT NULL, 
	"before" VARCHAR, 
	"after" VARCHAR NOT NULL, 
	"by" VARCHAR NOT NULL, 
	why VARCHAR NOT NULL, 
	proof JSON, 
	is_override BOOLEAN NOT NULL, 
	share FLOAT, 
	is_shadow BOOLEAN NOT NULL, 
	at DATETIME NOT NULL, 
	PRIMARY KEY ("key")
);
CREATE INDEX policy_move_by_version ON policy_move (project, version, "key");
CREATE TABLE proof (
	"key" INTEGER NOT NULL, 
	project VARCHAR NOT NULL, 
	id VARCHAR NOT NULL, 
	candidate VARCHAR NOT NULL, 
	baseline VARCHAR NOT NULL, 
	body JSON NOT NULL, 
	at DATETIME NOT NULL, 
	PRIMARY KEY ("key"), 
	UNIQUE (project, id)
);
CREATE INDEX proof_by_candidate ON proof (project, candidate, "key");
CREATE TABLE feedback (
	"key" INTEGER NOT NULL, 
	trace_key BIGINT NOT NULL, 
	source VARCHAR NOT NULL, 
	"by" VARCHAR NOT NULL, 
	score FLOAT, 
	text VARCHAR NOT NULL, 
	is_self_reported BOOLEAN NOT NULL, 
	given_at DATETIME NOT NULL, 
	PRIMARY KEY ("key")
);
CREATE INDEX feedback_by_trace ON feedback (trace_key, "key");
CREATE TABLE proposal (
	project VARCHAR NOT NULL, 
	id VARCHAR NOT NULL, 
	version INTEGER NOT NULL, 
	request VARCHAR NOT NULL, 
	answer VARCHAR NOT NULL, 
	cost_usd FLOAT, 
	given_at DATETIME NOT NULL, 
	PRIMARY KEY (project, id)
);
CREATE TABLE figure (
	project VARCHAR NOT NULL, 
	version INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	name VARCHAR NOT NULL, 
	value FLOAT, 
	at DATETIME NOT NULL, 
	PRIMARY KEY (project, version, step, name)
);
CREATE TABLE suite_audit (
	project VARCHAR NOT NULL, 
	id VARCHAR NOT NULL, 
	body JSON NOT NULL, 
	at DATETIME NOT NULL, 
	PRIMARY KEY (project, id)
);
CREATE TABLE run (
	number INTEGER NOT NULL, 
	project VARCHAR NOT NULL, 
	kind VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	state VARCHAR NOT NULL, 
	weight FLOAT NOT NULL, 
	asks VARCHAR NOT NULL, 
	bundle VARCHAR, 
	config_hash VARCHAR, 
	progress VARCHAR NOT NULL, 
	result VARCHAR NOT NULL, 
	why VARCHAR NOT NULL, 
	made_at DATETIME NOT NULL, 
	ended_at DATETIME, 
	PRIMARY KEY (number)
);
CREATE UNIQUE INDEX run_by_name ON run (project, name) WHERE state IN ('running', 'paused');
CREATE INDEX run_by_project ON run (project, number);
CREATE TABLE queue (
	number INTEGER NOT NULL, 
	project VARCHAR NOT NULL, 
	run BIGINT NOT NULL, 
	kind VARCHAR NOT NULL, 
	needs VARCHAR NOT NULL, 
	PRIMARY KEY (number), 
	UNIQUE (run, kind, needs)
);
CREATE TABLE unit (
	number INTEGER NOT NULL, 
	project VARCHAR NOT NULL, 
	"key" VARCHAR NOT NULL, 
	queue BIGINT NOT NULL, 
	state VARCHAR NOT NULL, 
	rank INTEGER NOT NULL, 
	position INTEGER NOT NULL, 
	limit_s FLOAT NOT NULL, 
	asks VARCHAR NOT NULL, 
	epoch INTEGER NOT NULL, 
	n_deaths INTEGER NOT NULL, 
	n_lost INTEGER NOT NULL, 
	owner VARCHAR, 
	not_before DATETIME, 
	result VARCHAR, 
	error VARCHAR NOT NULL, 
	history VARCHAR NOT NULL, 
	made_at DATETIME NOT NULL, 
	leased_at DATETIME, 
	ended_at DATETIME, 
	PRIMARY KEY (number), 
	UNIQUE (project, "key")
);
CREATE INDEX unit_ready ON unit (queue, rank, position, number) WHERE state = 'ready';
CREATE INDEX unit_leased ON unit (owner) WHERE state = 'leased';
CREATE INDEX unit_leased_by_queue ON unit (queue) WHERE state = 'leased';
CREATE INDEX unit_dead ON unit (queue) WHERE state = 'dead';
CREATE TABLE worker (
	id VARCHAR NOT NULL, 
	host VARCHAR NOT NULL, 
	pid INTEGER NOT NULL, 
	version VARCHAR NOT NULL, 
	kinds VARCHAR NOT NULL, 
	has VARCHAR NOT NULL, 
	n_slots INTEGER NOT NULL, 
	n_busy INTEGER NOT NULL, 
	state VARCHAR NOT NULL, 
	lease_s FLOAT NOT NULL, 
	note VARCHAR NOT NULL, 
	started_at DATETIME NOT NULL, 
	beat_at DATETIME NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE snapshot (
	project VARCHAR NOT NULL, 
	path VARCHAR NOT NULL, 
	step INTEGER NOT NULL, 
	sha256 VARCHAR, 
	made_at DATETIME NOT NULL, 
	PRIMARY KEY (project, path, step)
);
CREATE TABLE web_session (
	sha256 VARCHAR NOT NULL, 
	key_id VARCHAR NOT NULL, 
	used_at DATETIME NOT NULL, 
	PRIMARY KEY (sha256)
);
CREATE TABLE trace_visit (
	project VARCHAR NOT NULL, 
	trace_id VARCHAR NOT NULL, 
	"by" VARCHAR NOT NULL, 
	at DATETIME NOT NULL, 
	PRIMARY KEY (project, trace_id, "by")
);
CREATE TABLE reservation (
	project VARCHAR NOT NULL, 
	trace_id VARCHAR NOT NULL, 
	"by" VARCHAR NOT NULL, 
	ends_at DATETIME NOT NULL, 
	PRIMARY KEY (project, trace_id)
);
CREATE TABLE label_rejection (
	trace_key BIGINT NOT NULL, 
	type VARCHAR NOT NULL, 
	step INTEGER NOT NULL, 
	"by" VARCHAR NOT NULL, 
	labels JSON NOT NULL, 
	given_at DATETIME NOT NULL, 
	PRIMARY KEY (trace_key, type, step, "by")
);
CREATE INDEX trace_disputed ON trace (project, "key") WHERE reward_state = 'disputed';
CREATE INDEX trace_by_outcome ON trace (project, purpose, policy_version, task_id, reward_state, reward) WHERE task_id IS NOT NULL AND superseded IS NULL;
CREATE TABLE stored_object (
	sha256 VARCHAR NOT NULL, 
	put_at DATETIME NOT NULL, 
	PRIMARY KEY (sha256)
);
CREATE TABLE chore (
	name VARCHAR NOT NULL, 
	begun_at DATETIME NOT NULL, 
	PRIMARY KEY (name)
);
CREATE TABLE endpoint (
	project VARCHAR NOT NULL, 
	url VARCHAR NOT NULL, 
	host VARCHAR NOT NULL, 
	models VARCHAR NOT NULL, 
	note VARCHAR NOT NULL, 
	lease_s FLOAT NOT NULL, 
	started_at DATETIME NOT NULL, 
	beat_at DATETIME NOT NULL, 
	PRIMARY KEY (project, url)
);
INSERT INTO body_text(body_text, rank) VALUES ('automerge', 16);
INSERT INTO alembic_version (version_num) VALUES ('0012');
