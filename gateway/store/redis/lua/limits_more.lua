-- more of limits, version 7: what few requests need, and upkeep. Made within limits.lua.

local function by_epoch(counter)
  local reserved = counter[RESERVED]
  return type(reserved) == 'number' and {[counter[OF]] = reserved} or reserved
end

local function put(counter, reserved)
  local epoch, amount = next(reserved)
  if epoch and next(reserved, epoch) then
    counter[RESERVED] = reserved
  else
    counter[RESERVED], counter[OF] = amount or 0, epoch or ''
  end
end

local function hold_apart(counter, amount)
  local reserved = by_epoch(counter)
  local sum = (reserved[book.epoch] or 0) + amount
  reserved[book.epoch] = sum > 0 and sum or nil
  put(counter, reserved)
end

local models
local function models_of(hash)
  if not models then
    local kept = call('HGET', hash, 'models')
    models = kept and unpacked(kept) or {}
  end
  return models
end

-- Drops what lost models reserved; returns what is reserved.
local function heal(hash, counter)
  local known, reserved = {}, by_epoch(counter)
  for _, model in pairs(models_of(hash)) do known[model[1]] = true end
  if next(known) then
    for epoch in pairs(reserved) do
      if not known[epoch] then reserved[epoch] = nil end
    end
    put(counter, reserved)
  end
  return reserved_of(counter)
end

-- When the slice after the one that starts then begins.
local function next_of(limit, start_s)
  return limit.step_s > 0 and start_s + limit.step_s or limit.next_s
end

-- Removes slices that a wrong clock began, and returns what they counted.
local function recall(counter, limit, start_s)
  local early = 0
  while #counter > SLICES and counter[#counter - 1] > now_s do
    early = early + table.remove(counter)
    table.remove(counter)
  end
  counter[WARNED_S] = min(counter[WARNED_S], start_s)
  counter[ADDED_UNTIL_S] = min(counter[ADDED_UNTIL_S], next_of(limit, start_s) + limit.kept_s)
  return early
end

-- When so much is free again: by the calendar at the next window, else as slices age. 0 for
-- nothing: then reservations alone take the room, and nobody knows when they end.
local function resets_s(counter, limit, start_s, amount)
  if amount <= 0 then return 0 end
  if limit.step_s == 0 then return limit.next_s end
  local freed = 0
  for i = SLICES, #counter - 1, 2 do
    if counter[i] >= start_s - limit.kept_s then
      freed = freed + counter[i + 1]
      if freed >= amount then return counter[i] + limit.kept_s + limit.step_s end
    end
  end
  return start_s + limit.kept_s + limit.step_s
end

-- The denial by a limit that has no room, its place, what is used of it with what is reserved, and
-- when it has room.
local function denial(known, i, amount, used, start_s, service_s)
  local counter, limit = known.counters[i], known.limits[i]
  local reserved, free_s = reserved_of(counter), 0
  if start_s > 0 then
    free_s = resets_s(counter, limit, start_s, used - reserved + limit.wanted - amount)
  end
  local reason, wait_s = 'key_requests', free_s - now_s
  if limit.wanted > max(amount, limit.amount) then
    -- What an administrator took away comes back with the next window.
    reason, wait_s = 'exceeds_entitlement', 0
  elseif limit.unit == 'sequences' then
    reason, wait_s = 'key_concurrency', service_s / max(1, reserved)
  elseif limit.unit ~= 'requests' then
    reason = 'budget'
    if used - reserved + limit.wanted <= amount then
      reason = 'budget_reserved'
      wait_s = service_s / max(1, math.floor(reserved / max(1, limit.wanted)))
    end
  end
  return {reason, wait_s, amount, used, limit.wanted, limit.unit, false, i - 1, reserved, free_s}
end

-- What counts as used of a lease that expires.
local function expected_of(unit, _, expected)
  return unit ~= 'requests' and expected or 0
end

-- Counts the reservations of a lease that this server did not know, which was counted under an
-- epoch of the model. If only the model was lost since, its place in the minute is still there.
local function adopt(held, epoch)
  local counters, ids = counters_held(held)
  local model = models_of(held[1])[STATE]
  local counted = epoch and model and epoch ~= book.epoch
    and (epoch == model[1] or epoch == model[3])
  for i, counter in ipairs(counters) do
    local _, unit, slice_s, amount = unpack(held[i + 1])
    if unit ~= 'sequences' then
      local newest = #counter - 1
      if newest < SLICES or (counter[newest] < slice_s and slice_s <= now_s) then
        counter[#counter + 1], counter[#counter + 2] = min(slice_s, now_s), 0
      end
    end
    if unit ~= 'requests' then
      hold(counter, amount)
    elseif not counted then
      post(counter, slice_s, amount)
    end
  end
  save_counters(held[1], ids, counters)
end

-- What an administrator sees: the fields of a LimitView (gateway/records/limit.py).
local function view(known, i)
  local counter, limit = known.counters[i], known.limits[i]
  local reserved = heal(known.hash, counter)
  if limit.unit == 'sequences' then return {limit.id, reserved, reserved, 0, 0, 0} end
  local start_s = roll(counter, limit)
  return {limit.id, level(counter, start_s - limit.kept_s) + reserved, reserved,
    allowed(counter, 0), resets_s(counter, limit, start_s, 1), counter[TOTAL] + reserved}
end

local function add(known, i, amount)
  local counter, limit = known.counters[i], known.limits[i]
  local start_s = roll(counter, limit)
  counter[ADDED] = allowed(counter, 0) + amount
  counter[ADDED_UNTIL_S] = next_of(limit, start_s) + limit.kept_s
  save_counters(known.hash, known.ids, known.counters)
end

-- How long after its start a slice counts at most, by window; see limit_book.py.
local COUNTED_S = {minute = 62, hour = 7200, day = 172800, week = 691200, month = 2764800}
local LONGEST_S = 8640000

local function forgettable(hash, id, counter)
  if heal(hash, counter) ~= 0 or now_s < counter[ADDED_UNTIL_S] then return false end
  local since_s = now_s - (COUNTED_S[string.match(id, '[^:]*$')] or LONGEST_S)
  for i = SLICES, #counter - 1, 2 do
    if counter[i + 1] ~= 0 and counter[i] > since_s then return false end
  end
  return true
end

-- Drops those of the counters that are over; returns a page of others that are, and the next one.
local function sweep(hash, page, ids)
  if #ids > 0 then
    for i, counter in ipairs(counters_of(hash, ids)) do
      if forgettable(hash, ids[i], counter) then call('HDEL', hash, ids[i]) end
    end
  end
  local seen, found = call('HSCAN', hash, page, 'COUNT', 100), {}
  for i = 1, #seen[2], 2 do
    local id = seen[2][i]
    if string.find(id, ':', 1, true) and forgettable(hash, id, unpacked(seen[2][i + 1])) then
      found[#found + 1] = id
    end
  end
  return {seen[1], found}
end

-- Counts what all leases of the model reserve anew.
local function recount(hash)
  local sums = {}
  for _, kept in ipairs(call('HVALS', LEASES)) do
    local lease
    lease = READ_lease(kept)
    for i = 2, lease.held and #lease.held or 0 do
      local id, unit, _, amount = unpack(lease.held[i])
      if unit ~= 'requests' then sums[id] = (sums[id] or 0) + amount end
    end
  end
  for id, sum in pairs(sums) do
    local counters = counters_of(hash, {id})
    hold(counters[1], sum - (by_epoch(counters[1])[book.epoch] or 0))
    save_counters(hash, {id}, counters)
  end
end

-- Notes that the model is served; forgets those that nobody serves.
local function tick(hash, time_s, silent_s)
  local model = models_of(hash)[STATE]
  if not model or model[1] ~= book.epoch then
    recount(hash)
    models[STATE] = {book.epoch, time_s, model and model[1]}
  else
    model[2] = time_s
  end
  for name, other in pairs(models) do
    if other[2] < time_s - silent_s then models[name] = nil end
  end
  call('HSET', hash, 'models', pack(models))
end

return {
  hold = hold_apart, heal = heal, recall = recall, denial = denial,
  adopt = adopt, view = view, add = add, sweep = sweep, tick = tick,
  lapse = function(held) change(held, -1, expected_of) end,
  revive = function(held)
    change(held, 1, function(unit, _, expected) return -expected_of(unit, nil, expected) end)
  end,
  correct = function(held, spent)
    local used = used_by(spent)
    change(held, 0, function(unit, amount, expected)
      return used(unit, amount) - expected_of(unit, nil, expected)
    end)
  end,
}
